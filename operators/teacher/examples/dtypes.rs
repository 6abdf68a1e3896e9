//! Measures the accuracy and speed of each dtype on a text, compared with f32:
//!
//! ```text
//! cargo run --release -p stillhouse-teacher --example dtypes -- MODEL TEXT [fp8]
//! ```
//!
//! `fp8` also measures the accuracy of fp8, compared with f32 on a GPU. Both run on the host's emulation of a GPU,
//! whose sums are exact and whose speed is meaningless.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use stillhouse_gpu_host::Host;
use stillhouse_teacher::probe::{PrecisionDifference, Reference, Text, seconds};
use stillhouse_teacher::stillhouse_gpu::Device;
use stillhouse_teacher::{DeviceChoice, LoadOptions, Precision, gguf_tokenizer, gpu, load};
use tokenizers::Tokenizer;

type Failure = Box<dyn std::error::Error + Send + Sync>;

const LENGTH: usize = 256;

fn main() -> Result<(), Failure> {
    let arguments: Vec<PathBuf> = std::env::args().skip(1).map(PathBuf::from).collect();
    let (model, text, with_fp8) = match arguments.as_slice() {
        [model, text] => (model, text, false),
        [model, text, last] if last.as_os_str() == "fp8" => (model, text, true),
        _ => return Err("usage: dtypes MODEL TEXT [fp8]".into()),
    };
    let ids = tokenizer(model)?.encode_fast(std::fs::read_to_string(text)?, false)?;
    let load = |dtype| load(model, &LoadOptions { device: DeviceChoice::Cpu, dtype, ..LoadOptions::default() });
    let teacher = load(Precision::F32)?;
    let text = Text::new(ids.get_ids().chunks(LENGTH), teacher.info().vocab_size);
    let of_fp8 = text.clone();
    println!("{} tokens in sequences of {LENGTH}; KL and changes in nat", text.tokens());
    println!("{:>6} {:>10} {:>11} {:>11} {:>11}", "dtype", "tokens/s", "mean KL", "largest KL", "ln p moves");
    let count = text.tokens() as f64;
    let reference = Reference::new(text, teacher.as_ref())?;
    println!("{:>6} {:>10.0}", "f32", count / seconds(teacher.as_ref(), reference.text())?);
    drop(teacher);
    for dtype in [Precision::F16, Precision::Bf16, Precision::Bf16x3] {
        let teacher = match load(dtype) {
            Ok(teacher) => teacher,
            Err(e) => {
                println!("{dtype:>6} {e}");
                continue;
            }
        };
        let difference = reference.difference(teacher.as_ref())?;
        let speed = count / seconds(teacher.as_ref(), reference.text())?;
        print(dtype, &format!("{speed:.0}"), &difference);
    }
    if with_fp8 {
        let device: Arc<dyn Device> = Arc::new(Host::new(0));
        let load = |dtype| gpu::load(model, &device, &LoadOptions { dtype, ..LoadOptions::default() });
        let reference = Reference::new(of_fp8, load(Precision::F32)?.as_ref())?;
        for dtype in [Precision::Bf16, Precision::Fp8] {
            print(dtype, "host", &reference.difference(load(dtype)?.as_ref())?);
        }
    }
    Ok(())
}

fn print(dtype: Precision, speed: &str, difference: &PrecisionDifference) {
    println!(
        "{:>6} {speed:>10} {:>11.2e} {:>11.2e} {:>11.2e}",
        dtype.to_string(),
        difference.mean_kl_nats,
        difference.max_kl_nats,
        difference.max_logprob_change_nats
    );
}

fn tokenizer(model: &Path) -> Result<Tokenizer, Failure> {
    Ok(if model.is_dir() {
        Tokenizer::from_file(model.join("tokenizer.json"))?
    } else {
        gguf_tokenizer(model)?.tokenizer
    })
}
