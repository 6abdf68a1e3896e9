//! Text generation on a device: one writer whose slots are filled with prompts from any split.
//!
//! ```text
//!   request ─► slots ─► step, step, … ─► all its texts have ended ─► split
//!      ▲         └ a slot is free and no text waits ┘
//!      └───────────────── next request
//! ```

use super::{Arc, Done, GenerateConfig, Meter, RecordBatch, Reply, Request, Teacher, UnderWay, Writer, mpsc};

/// A generation request.
pub(super) struct Prompts {
    pub config: Arc<GenerateConfig>,
    pub batch: RecordBatch,
    pub meter: Arc<dyn Meter>,
    pub reply: Reply,
}

/// Serves a request, and those that arrive while slots are free, until all texts are written. Returns a request that it
/// cannot serve.
pub(super) fn write<'t>(
    teacher: &'t dyn Teacher,
    kept: &mut Option<Writer<'t, Reply>>,
    first: Prompts,
    requests: &mut mpsc::Receiver<Request>,
    under_way: &UnderWay,
) -> Option<Request> {
    let writer = match kept {
        Some(writer) if *writer.config() == first.config => writer,
        _ => match Writer::new(teacher, Arc::clone(&first.config)) {
            Ok(writer) => kept.insert(writer),
            Err(error) => {
                let _ = first.reply.send(Err(error));
                return None;
            }
        },
    };
    begin(writer, first, under_way);
    let mut for_others = None;
    while !writer.is_idle() {
        while for_others.is_none()
            && writer.has_room()
            && let Ok(request) = requests.try_recv()
        {
            match request {
                Request::Write { reply, .. } if reply.is_closed() => {}
                Request::Write { config, batch, meter, reply } if config == *writer.config() => {
                    begin(writer, Prompts { config, batch, meter, reply }, under_way);
                }
                other => for_others = Some(other),
            }
        }
        // requests whose split has ended meanwhile
        writer.forget(Reply::is_closed).into_iter().for_each(|_| under_way.end());
        for (reply, written) in writer.step() {
            under_way.end();
            let done = written.map(|w| Done { batch: w.batch, statistics: w.statistics, busy: w.busy });
            // The receiver may be gone.
            let _ = reply.send(done);
        }
    }
    for_others
}

fn begin(writer: &mut Writer<'_, Reply>, prompts: Prompts, under_way: &UnderWay) {
    let Prompts { batch, meter, reply, .. } = prompts;
    under_way.begin(meter.as_ref());
    if let Err((reply, error)) = writer.push(reply, &batch, meter) {
        under_way.end();
        let _ = reply.send(Err(error));
    }
}
