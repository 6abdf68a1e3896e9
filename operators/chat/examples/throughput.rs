//! Conversations per second on one core, for a template of the tests.
//!
//! ```sh
//! cargo run --release -p stillhouse-chat --example throughput -- operators/chat/tests/templates/qwen2_5.jinja
//! ```

use std::collections::BTreeMap;
use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

use stillhouse_chat::{ChatTemplate, Conversation, TrainOn};

const ROUNDS: u32 = 5_000;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("which template file?")?;
    let tokens = BTreeMap::from([("eos_token".to_string(), "<|im_end|>".to_string())]);
    let template = ChatTemplate::new(&std::fs::read_to_string(&path)?, &tokens, None, None)?;
    // seven messages, 2.5 kB
    let turn = |role: &str, text: &str| format!("{{\"role\": \"{role}\", \"content\": \"{}\"}}", text.repeat(8));
    let mut messages = vec![turn("system", "You are a helpful assistant. ")];
    for _ in 0..3 {
        messages.push(turn("user", "What is the capital of France, and why? "));
        messages.push(turn("assistant", "Paris, since the tenth century or so. "));
    }
    let json = format!("[{}]", messages.join(","));
    let measure = |name: &str, run: &dyn Fn() -> Result<usize, Box<dyn Error>>| -> Result<(), Box<dyn Error>> {
        let started = Instant::now();
        for _ in 0..ROUNDS {
            black_box(run()?);
        }
        println!("{name}: {:.0} conversations/s", f64::from(ROUNDS) / started.elapsed().as_secs_f64());
        Ok(())
    };
    measure("parse", &|| Ok(Conversation::parse(&json, None)?.messages().len()))?;
    measure("parse and render", &|| Ok(template.render(&Conversation::parse(&json, None)?, false)?.len()))?;
    measure("parse and render_trained", &|| {
        let conversation = Conversation::parse(&json, None)?;
        Ok(template.render_trained(&conversation, TrainOn::Assistant)?.trained.len())
    })
}
