//! Text that the teacher writes on a device: batches of prompts, from any split, in the slots of one writer.
//!
//! ```text
//!   a request ─► slots ─► step, step, … ─► its texts have all ended ─► the split
//!        ▲         └ one is free, and nothing waits ┘
//!        └───────────────── the next request
//! ```

use super::{Arc, Done, GenerateConfig, Meter, RecordBatch, Reply, Request, Teacher, UnderWay, Writer, mpsc};

/// A request.
pub(super) struct Prompts {
    pub config: Arc<GenerateConfig>,
    pub batch: RecordBatch,
    pub meter: Arc<dyn Meter>,
    pub reply: Reply,
}

/// Serves a request, and those that come while slots are free, until nothing is left to write. Gives a request that is for others.
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
        // whose split has ended meanwhile
        writer.forget(Reply::is_closed).into_iter().for_each(|_| under_way.end());
        for (reply, written) in writer.step() {
            under_way.end();
            let done = written.map(|w| Done { batch: w.batch, statistics: w.statistics, busy: w.busy });
            // nobody may be left to take it
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
