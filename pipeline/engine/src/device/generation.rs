//! Text generation on a device: one writer whose slots are filled with prompts from any split.
//!
//! ```text
//!   request ─► slots ─► step, step, … ─► all its texts have ended ─► split
//!      ▲         └ a slot is free and no text waits ┘
//!      └───────────────── next request
//! ```

use super::{Arc, FinishedBatch, GenerateConfig, InFlight, Meter, RecordBatch, Reply, Request, Teacher, Writer, mpsc};

/// A generation request.
pub(super) struct GenerationRequest {
    pub config: Arc<GenerateConfig>,
    pub batch: RecordBatch,
    pub meter: Arc<dyn Meter>,
    pub reply: Reply,
}

/// Serves a request, and those that arrive while slots are free, until all texts are written. Returns a request that it
/// cannot serve.
pub(super) fn serve<'t>(
    teacher: &'t dyn Teacher,
    current_writer: &mut Option<Writer<'t, Reply>>,
    first: GenerationRequest,
    requests: &mut mpsc::Receiver<Request>,
    in_flight: &InFlight,
) -> Option<Request> {
    let writer = match current_writer {
        Some(writer) if *writer.config() == first.config => writer,
        _ => match Writer::new(teacher, Arc::clone(&first.config)) {
            Ok(writer) => current_writer.insert(writer),
            Err(error) => {
                let _ = first.reply.send(Err(error));
                return None;
            }
        },
    };
    enqueue(writer, first, in_flight);
    let mut unserved = None;
    while !writer.is_idle() {
        while unserved.is_none()
            && writer.has_room()
            && let Ok(request) = requests.try_recv()
        {
            match request {
                Request::Generate { reply, .. } if reply.is_closed() => {}
                Request::Generate { config, batch, meter, reply } if config == *writer.config() => {
                    enqueue(writer, GenerationRequest { config, batch, meter, reply }, in_flight);
                }
                other => unserved = Some(other),
            }
        }
        // requests whose split has ended meanwhile
        writer.forget(Reply::is_closed).into_iter().for_each(|_| in_flight.end());
        for (reply, written) in writer.step() {
            in_flight.end();
            let done = written.map(|w| FinishedBatch { batch: w.batch, statistics: w.statistics, busy: w.busy });
            // The receiver may be gone.
            let _ = reply.send(done);
        }
    }
    unserved
}

fn enqueue(writer: &mut Writer<'_, Reply>, request: GenerationRequest, in_flight: &InFlight) {
    let GenerationRequest { batch, meter, reply, .. } = request;
    in_flight.begin(meter.as_ref());
    if let Err((reply, error)) = writer.push(reply, &batch, meter) {
        in_flight.end();
        let _ = reply.send(Err(error));
    }
}
