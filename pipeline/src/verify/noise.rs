//! The noise itself: logits recomputed for whole batches as the job ran them, and every stored token checked.
//!
//! For each predicted token: the stored ln p against the recomputed one, argmax_k(l_k + ξ_k) = x with ξ exact, and the
//! total variation between softmax(ξ) and what is stored (replayed and corrected, or dense).

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use arrow::array::RecordBatch;
use rayon::prelude::*;
use stillhouse_noise::{Correction, DrawKey, NoiseStream, Softmax, StoredToken, dense_noise, total_variation_of};
use stillhouse_operators::extract::pass::{Predicted, Sequence, TeacherPass};
use stillhouse_operators::extract::sequences;
use stillhouse_operators::invariants::{Widened, float_column, unsigned_column};
use stillhouse_operators::operator::OperatorError;
use stillhouse_schemas::columns;
use stillhouse_schemas::manifest::{Manifest, ShardRecord};
use stillhouse_schemas::paths::{Part, parts};
use stillhouse_schemas::spec::{Extract, NoiseCodec};
use stillhouse_teacher::Teacher;

use super::{TeacherCheck, Verification, VerifyOptions};
use crate::access::Access;
use crate::dataset::Dataset;
use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer};
use crate::hub::{self, HubRef, Wanted};
use crate::job::local_path;
use crate::names::Names;
use crate::{operators, plan, run};

/// Log-probabilities may differ by this much where the teacher runs on another kind of machine than the job did.
const LOGPROB_TOLERANCE: f64 = 2e-3;
/// The recomputed logits may differ in their last bits; this is far above what that moves, far below a tolerance.
const VARIATION_SLACK: f64 = 2e-5;
/// Batches that are recomputed unless asked otherwise.
const DEFAULT_BATCHES: usize = 2;

pub(super) async fn check(
    dataset: &Dataset,
    options: &VerifyOptions,
    found: &mut Verification,
    observer: &dyn Observer,
) -> Result<()> {
    let manifest = dataset.manifest();
    let (Some(extract), Some(record)) = (&manifest.job.extract, &manifest.teacher) else {
        return Err(PipelineError::new(ErrorKind::Usage, "--teacher: this data set was made without a teacher"));
    };
    observer.event(&Event::Preparing { what: format!("loading the teacher {}", record.source) });
    let job_folder = dataset.output().job_folder().await;
    let teacher = tokio::task::block_in_place(|| load(dataset, options, extract, job_folder, found))?;
    let per_batch = operators::rows_per_batch(&manifest.job);
    let wanted = if options.teacher_batches == 0 { DEFAULT_BATCHES } else { options.teacher_batches };
    let picked = pick(manifest, per_batch, wanted);
    let mut check = TeacherCheck {
        tolerance: extract.noise.as_ref().filter(|n| n.codec == NoiseCodec::Replay).map(|n| n.tolerance),
        ..TeacherCheck::default()
    };
    let mut variation_sum = 0.0;
    for (shard, offset) in picked {
        observer.event(&Event::Preparing { what: format!("recomputing {} from row {offset}", shard.path) });
        let Some(batch) = dataset.rows(shard, offset, per_batch).await? else { continue };
        let job = Recomputed {
            manifest,
            extract,
            bos: record.bos_token_id,
            teacher: Arc::clone(&teacher),
            place: shard.path.clone(),
            offset,
        };
        tokio::task::block_in_place(|| job.check(&batch, &mut check, &mut variation_sum, found))
            .map_err(|e| PipelineError::caused(ErrorKind::Model, dataset.shown(&shard.path), e))?;
    }
    if check.noises > 0 {
        check.total_variation_mean = variation_sum / check.noises as f64;
    }
    found.teacher = Some(check);
    Ok(())
}

fn load(
    dataset: &Dataset,
    options: &VerifyOptions,
    extract: &Extract,
    job_folder: Option<PathBuf>,
    found: &mut Verification,
) -> Result<Arc<dyn Teacher>> {
    let record = dataset.manifest().teacher.as_ref();
    let path = match &options.teacher_path {
        Some(path) => path.clone(),
        None => of_the_job(&extract.teacher.path, job_folder)?,
    };
    if !path.exists() {
        return Err(PipelineError::new(
            ErrorKind::Usage,
            format!("no teacher at {}, where the job had it; name it with --teacher-path", path.display()),
        ));
    }
    let device = options.device.as_deref().unwrap_or(&extract.teacher.device);
    let teacher = run::load(&path, device, extract.teacher.dtype)?;
    for (name, file) in &teacher.info().weights {
        let expected = record.and_then(|r| r.files.get(name));
        let got = plan::hash_file(file)?;
        if expected != Some(&got) {
            found.fault(file.display().to_string(), format!("sha256 {got} is not that of the job's teacher"));
        }
    }
    Ok(teacher)
}

/// Where the job found its teacher. A manifest may be of somebody else, so that no variable of this environment goes into it.
fn of_the_job(path: &str, job_folder: Option<PathBuf>) -> Result<PathBuf> {
    let is_variable = |part: &Part<'_>| matches!(part, Part::Variable(_));
    if parts(path).is_ok_and(|parts| parts.iter().any(is_variable)) {
        let message = format!("the job had its teacher at {path}; name it with --teacher-path");
        return Err(PipelineError::new(ErrorKind::Usage, message));
    }
    let real = Names::of(&Access::everything()).real(path).map_err(|e| PipelineError::new(ErrorKind::Usage, e))?;
    if let Ok(Some(reference)) = HubRef::parse(&real) {
        return Ok(hub::fetch(&reference, Wanted::Teacher, &|_, _, _| {})?.path);
    }
    let there = local_path(&job_folder.unwrap_or_default(), &real);
    let here = PathBuf::from(&real);
    Ok([&there, &here].into_iter().find(|path| path.exists()).unwrap_or(&there).clone())
}

/// Batches spread evenly over the rows of the data set, each beginning where a batch of the job began.
fn pick(manifest: &Manifest, per_batch: usize, wanted: usize) -> Vec<(&ShardRecord, usize)> {
    let all: Vec<(&ShardRecord, usize)> = manifest
        .shards
        .iter()
        .flat_map(|shard| (0..shard.rows as usize).step_by(per_batch).map(move |offset| (shard, offset)))
        .collect();
    let n = wanted.min(all.len());
    (0..n).map(|i| all[(2 * i + 1) * all.len() / (2 * n)]).collect()
}

struct Recomputed<'a> {
    manifest: &'a Manifest,
    extract: &'a Extract,
    bos: u32,
    teacher: Arc<dyn Teacher>,
    place: String,
    offset: usize,
}

/// The stored columns of a batch.
struct Stored {
    logprob: Widened<f32>,
    replay: Option<(Widened<u32>, Widened<u32>, Widened<f32>)>,
    dense: Option<Widened<f32>>,
}

/// What the check of one token and draw gave.
struct TokenCheck {
    logprob_difference: f64,
    variation: Option<f64>,
    argmax_hit: Option<bool>,
}

impl Recomputed<'_> {
    fn check(
        &self,
        batch: &RecordBatch,
        check: &mut TeacherCheck,
        variation_sum: &mut f64,
        found: &mut Verification,
    ) -> Result<(), OperatorError> {
        let arrow = OperatorError::arrow("verify");
        let sequences = sequences(batch).map_err(&arrow)?;
        let stored = Stored {
            logprob: float_column(batch, columns::LOGPROB).map_err(&arrow)?,
            replay: match batch.column_by_name(columns::NOISE_COUNT) {
                Some(_) => Some((
                    unsigned_column(batch, columns::NOISE_COUNT).map_err(&arrow)?,
                    unsigned_column(batch, columns::NOISE_INDEX).map_err(&arrow)?,
                    float_column(batch, columns::NOISE_LOGPROB).map_err(&arrow)?,
                )),
                None => None,
            },
            dense: match batch.column_by_name(columns::NOISE) {
                Some(_) => Some(float_column(batch, columns::NOISE).map_err(&arrow)?),
                None => None,
            },
        };
        let nanos = AtomicU64::new(0);
        let pass = TeacherPass {
            teacher: self.teacher.as_ref(),
            bos: self.bos,
            context: self.extract.context,
            batch_tokens: self.extract.teacher.batch_tokens as usize,
            teacher_nanos: &nanos,
        };
        let mut predicted: Vec<Vec<bool>> = sequences.iter().map(|s| vec![false; s.tokens.len()]).collect();
        check.sequences += sequences.len() as u64;
        pass.run(&sequences, &mut |positions, logits| {
            let vocab = self.teacher.info().vocab_size;
            let results: Result<Vec<Vec<TokenCheck>>, String> = positions
                .par_iter()
                .zip(logits.par_chunks_exact(vocab))
                .map(|(p, logits)| self.token(&sequences, &stored, *p, logits))
                .collect();
            let results = results.map_err(|message| OperatorError::Data {
                operator: "verify",
                place: self.place.clone(),
                message,
            })?;
            for (p, draws) in positions.iter().zip(results) {
                predicted[p.row][p.position] = true;
                check.tokens += 1;
                for result in draws {
                    self.judge(*p, &result, check, variation_sum, found);
                }
            }
            Ok(())
        })?;
        self.check_certain(&sequences, &stored, &predicted, found);
        Ok(())
    }

    fn judge(
        &self,
        p: Predicted,
        result: &TokenCheck,
        check: &mut TeacherCheck,
        sum: &mut f64,
        found: &mut Verification,
    ) {
        let place = || format!("{} row {} position {}", self.place, self.offset + p.row, p.position);
        check.logprob_difference_max = check.logprob_difference_max.max(result.logprob_difference);
        if result.logprob_difference > LOGPROB_TOLERANCE {
            found.fault(
                place(),
                format!("logprob differs by {:.3e} from the recomputed one", result.logprob_difference),
            );
        }
        if let Some(variation) = result.variation {
            check.noises += 1;
            *sum += variation;
            check.total_variation_max = check.total_variation_max.max(variation);
            let limit = check.tolerance.unwrap_or(DENSE_VARIATION) + VARIATION_SLACK;
            if variation > limit {
                found.fault(place(), format!("total variation {variation:.3e}, valid: at most {limit:.3e}"));
            }
        }
        match result.argmax_hit {
            Some(true) => check.argmax_hits += 1,
            Some(false) => found.fault(place(), "argmax(l + ξ) is not the observed token"),
            None => {}
        }
    }

    fn token(
        &self,
        sequences: &[Sequence],
        stored: &Stored,
        p: Predicted,
        logits: &[f32],
    ) -> Result<Vec<TokenCheck>, String> {
        let vocab = logits.len();
        let sequence = &sequences[p.row];
        let length = sequence.tokens.len();
        let x = sequence.tokens[p.position];
        let fail = |e: stillhouse_noise::NoiseError| e.to_string();
        let mut softmax = Softmax::new(vocab).map_err(fail)?;
        softmax.load(logits).map_err(fail)?;
        let logprob = stored.logprob.row(p.row)[p.position];
        let difference = (softmax.logprob(logits[x as usize]) - f64::from(logprob)).abs();
        let Some(noise) = &self.extract.noise else {
            return Ok(vec![TokenCheck { logprob_difference: difference, variation: None, argmax_hit: None }]);
        };
        let seed = self.manifest.noise_seed.unwrap_or_default();
        let mut xi = vec![0.0; vocab];
        let mut checks = Vec::with_capacity(noise.draws as usize);
        for draw in 0..noise.draws {
            let stream = NoiseStream::new(DrawKey::new(seed, draw), sequence.id, p.position as u32);
            dense_noise(&mut softmax, logits, x, &stream, &mut xi).map_err(fail)?;
            let at = draw as usize * length + p.position;
            let variation = if let Some((counts, indices, logprobs)) = &stored.replay {
                let counts = counts.row(p.row);
                let start: usize = counts[..at].iter().map(|&c| c as usize).sum();
                let range = start..start + counts[at] as usize;
                let corrections: Vec<Correction> = indices.row(p.row)[range.clone()]
                    .iter()
                    .zip(&logprobs.row(p.row)[range])
                    .map(|(&index, &logprob)| Correction { index, logprob })
                    .collect();
                let token = StoredToken { token: x, logprob, corrections: &corrections };
                Some(total_variation_of(logits, &token, &stream).map_err(fail)?)
            } else {
                stored.dense.as_ref().map(|dense| {
                    let dense = &dense.row(p.row)[at * vocab..(at + 1) * vocab];
                    total_variation(&softmax_of(&xi), &softmax_of(dense))
                })
            };
            checks.push(TokenCheck {
                logprob_difference: difference,
                variation,
                argmax_hit: Some(argmax(logits, &xi) == x as usize),
            });
        }
        Ok(checks)
    }

    /// Positions that are not predicted must be stored as certain.
    fn check_certain(
        &self,
        sequences: &[Sequence],
        stored: &Stored,
        predicted: &[Vec<bool>],
        found: &mut Verification,
    ) {
        for (row, sequence) in sequences.iter().enumerate() {
            let certain = predicted[row].iter().enumerate().filter(|(_, predicted)| !**predicted);
            for (position, _) in certain {
                let counts = stored.replay.as_ref().map(|(counts, ..)| counts.row(row));
                let corrected =
                    counts.is_some_and(|c| c.iter().skip(position).step_by(sequence.tokens.len()).any(|&n| n != 0));
                if stored.logprob.row(row)[position] != 0.0 || corrected {
                    found.fault(
                        format!("{} row {} position {position}", self.place, self.offset + row),
                        "is given or padding, but is not stored as certain",
                    );
                }
            }
        }
    }
}

/// Dense noise in half precision: an error of 2^-11 in ξ is one of 5e-4 in a weight, ξ up to 22 has 2^-7.
const DENSE_VARIATION: f64 = 2e-2;

fn argmax(logits: &[f32], xi: &[f32]) -> usize {
    let score = |k: usize| f64::from(logits[k]) + f64::from(xi[k]);
    (1..logits.len()).fold(0, |best, k| if score(k) > score(best) { k } else { best })
}

fn softmax_of(xi: &[f32]) -> Vec<f64> {
    let max = xi.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    let weights: Vec<f64> = xi.iter().map(|v| f64::from(v - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|w| w / sum).collect()
}

fn total_variation(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).sum::<f64>() / 2.0
}
