//! What each type costs on a text and how fast it is here, beside f32:
//!
//! ```text
//! cargo run --release -p stillhouse-teacher --example dtypes -- MODEL TEXT
//! ```

use std::path::{Path, PathBuf};

use stillhouse_teacher::probe::{Reference, Text, seconds};
use stillhouse_teacher::{DeviceChoice, LoadOptions, Precision, gguf_tokenizer, load};
use tokenizers::Tokenizer;

type Failure = Box<dyn std::error::Error + Send + Sync>;

const LENGTH: usize = 256;

fn main() -> Result<(), Failure> {
    let arguments: Vec<PathBuf> = std::env::args().skip(1).map(PathBuf::from).collect();
    let [model, text] = arguments.as_slice() else { return Err("usage: dtypes MODEL TEXT".into()) };
    let ids = tokenizer(model)?.encode_fast(std::fs::read_to_string(text)?, false)?;
    let load = |dtype| load(model, &LoadOptions { device: DeviceChoice::Cpu, dtype, ..LoadOptions::default() });
    let teacher = load(Precision::F32)?;
    let text = Text::new(ids.get_ids().chunks(LENGTH), teacher.info().vocab_size);
    println!("{} tokens in sequences of {LENGTH}; KL and changes in nat", text.tokens());
    println!("{:>6} {:>10} {:>11} {:>11} {:>11}", "dtype", "tokens/s", "mean KL", "largest KL", "ln p moves");
    let count = text.tokens() as f64;
    let reference = Reference::new(text, teacher.as_ref())?;
    println!("{:>6} {:>10.0}", "f32", count / seconds(teacher.as_ref(), reference.text())?);
    drop(teacher);
    for dtype in [Precision::F16, Precision::Bf16, Precision::Bf16x3, Precision::Int8] {
        let teacher = match load(dtype) {
            Ok(teacher) => teacher,
            Err(e) => {
                println!("{dtype:>6} {e}");
                continue;
            }
        };
        let difference = reference.difference(teacher.as_ref())?;
        let speed = count / seconds(teacher.as_ref(), reference.text())?;
        println!(
            "{:>6} {speed:>10.0} {:>11.2e} {:>11.2e} {:>11.2e}",
            dtype.to_string(),
            difference.mean_kl_nats,
            difference.max_kl_nats,
            difference.max_logprob_change_nats
        );
    }
    Ok(())
}

fn tokenizer(model: &Path) -> Result<Tokenizer, Failure> {
    Ok(if model.is_dir() {
        Tokenizer::from_file(model.join("tokenizer.json"))?
    } else {
        gguf_tokenizer(model)?.tokenizer
    })
}
