//! Text generation on a device: one decoder whose slots are filled with prompts from any split.
//!
//! ```text
//!   request ─► slots ─► step, step, … ─► all its texts have ended ─► split
//!      ▲         └ a slot is free and no text waits ┘
//!      └───────────────── next request
//! ```

use super::{
    Arc, BatchedDecoder, FinishedBatch, GenerateConfig, InFlight, Meter, RecordBatch, Reply, Request, Teacher, mpsc,
};

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
    current_writer: &mut Option<BatchedDecoder<'t, Reply>>,
    first: GenerationRequest,
    requests: &mut mpsc::Receiver<Request>,
    in_flight: &InFlight,
) -> Option<Request> {
    let decoder = match current_writer {
        Some(decoder) if *decoder.config() == first.config => decoder,
        _ => match BatchedDecoder::new(teacher, Arc::clone(&first.config)) {
            Ok(decoder) => current_writer.insert(decoder),
            Err(error) => {
                let _ = first.reply.send(Err(error));
                return None;
            }
        },
    };
    enqueue(decoder, first, in_flight);
    let mut unserved = None;
    while !decoder.is_idle() {
        while unserved.is_none()
            && decoder.has_free_slot()
            && let Ok(request) = requests.try_recv()
        {
            match request {
                Request::Generate { reply, .. } if reply.is_closed() => {}
                Request::Generate { config, batch, meter, reply } if config == *decoder.config() => {
                    enqueue(decoder, GenerationRequest { config, batch, meter, reply }, in_flight);
                }
                other => unserved = Some(other),
            }
        }
        // requests whose split has ended meanwhile
        decoder.cancel(Reply::is_closed).into_iter().for_each(|_| in_flight.end());
        for (reply, written) in decoder.step() {
            in_flight.end();
            let done = written.map(|w| FinishedBatch { batch: w.batch, statistics: w.statistics, busy: w.busy });
            // The receiver may be gone.
            let _ = reply.send(done);
        }
    }
    unserved
}

fn enqueue(decoder: &mut BatchedDecoder<'_, Reply>, request: GenerationRequest, in_flight: &InFlight) {
    let GenerationRequest { batch, meter, reply, .. } = request;
    in_flight.begin(meter.as_ref());
    if let Err((reply, error)) = decoder.push(reply, &batch, meter) {
        in_flight.end();
        let _ = reply.send(Err(error));
    }
}
