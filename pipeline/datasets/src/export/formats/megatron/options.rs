//! Options of `stillhouse export --format megatron-kd`.

use super::{Identity, MegatronRun};

/// The options that describe the run of Megatron-LM.
#[derive(Debug, clap::Args)]
pub struct MegatronOptions {
    /// megatron-kd: --global-batch-size of the run
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    global_batch: Option<u32>,
    /// megatron-kd: --micro-batch-size of the run [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    micro_batch: Option<u32>,
    /// megatron-kd: ranks of data parallelism [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    data_parallel: Option<u32>,
    /// megatron-kd: --seq-length of the run [default: one less than a row]
    #[arg(long, value_name = "N")]
    sequence_length: Option<u32>,
    /// megatron-kd: iterations of a file [default: 100]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    iterations_per_file: Option<u32>,
    /// megatron-kd: hash of the run, where its reader has said it
    #[arg(long, value_name = "MD5", conflicts_with = "blend")]
    hash: Option<String>,
    /// megatron-kd: a data set of the run's --data-path, with its weight where there are several; as often as there are data sets
    #[arg(long, value_name = "NAME[=WEIGHT]")]
    blend: Vec<String>,
    /// megatron-kd: --seed of the run [default: 1234]
    #[arg(long, value_name = "N", conflicts_with = "hash", allow_negative_numbers = true)]
    seed: Option<i64>,
    /// megatron-kd: --train-samples of the run, or iterations times global batch [default: what is exported]
    #[arg(long, value_name = "N", conflicts_with = "hash")]
    train_samples: Option<u64>,
}

impl MegatronOptions {
    /// The first of these options that is given.
    pub(in super::super) fn given(&self) -> Option<&'static str> {
        let given = [
            ("--global-batch", self.global_batch.is_some()),
            ("--micro-batch", self.micro_batch.is_some()),
            ("--data-parallel", self.data_parallel.is_some()),
            ("--sequence-length", self.sequence_length.is_some()),
            ("--iterations-per-file", self.iterations_per_file.is_some()),
            ("--hash", self.hash.is_some()),
            ("--blend", !self.blend.is_empty()),
            ("--seed", self.seed.is_some()),
            ("--train-samples", self.train_samples.is_some()),
        ];
        given.into_iter().find(|(_, given)| *given).map(|(option, _)| option)
    }

    /// Returns the settings of the export.
    ///
    /// # Errors
    /// If a required option is missing, or a value is invalid.
    pub(in super::super) fn run(&self) -> Result<MegatronRun, String> {
        let missing = |what: &str| format!("--format megatron-kd needs {what}");
        let global_batch = self.global_batch.ok_or_else(|| missing("--global-batch, that of the run"))?;
        let identity = match &self.hash {
            Some(hash) => Identity::Hash(hash.clone()),
            None if self.blend.is_empty() => {
                return Err(missing(
                    "--blend (and --seed, --train-samples) or --hash: its reader accepts only data of its own run",
                ));
            }
            None => Identity::Of {
                seed: self.seed.unwrap_or(1234),
                train_samples: self.train_samples,
                blend: self.blend.iter().map(|data| weighted(data)).collect::<Result<_, _>>()?,
            },
        };
        Ok(MegatronRun {
            micro_batch: self.micro_batch.unwrap_or(1),
            global_batch,
            data_parallel: self.data_parallel.unwrap_or(1),
            sequence_length: self.sequence_length,
            iterations_per_file: self.iterations_per_file.unwrap_or(100),
            identity,
        })
    }
}

/// Parses `NAME` or `NAME=WEIGHT`.
fn weighted(data: &str) -> Result<(f64, String), String> {
    let Some((name, weight)) = data.rsplit_once('=') else { return Ok((1.0, data.to_owned())) };
    let weight = weight.parse::<f64>().ok().filter(|weight| weight.is_finite());
    let wrong = || format!("--blend: got {data:?}, valid: NAME or NAME=WEIGHT, such as data/owt_text_document=0.7");
    Ok((weight.ok_or_else(wrong)?, name.to_owned()))
}
