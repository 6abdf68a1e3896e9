//! Checks the noise: recomputes the logits of whole batches as the job ran them, and checks every stored token.
//!
//! For each predicted token this compares the stored ln p with the recomputed one. For each of its noise vectors ξ it
//! takes the **stored form** ξ̂ (replayed and corrected, or dense). It computes the total variation between softmax(ξ)
//! and softmax(ξ̂), and whether argmax_k(l_k + ξ̂_k) = x, which a data set promises if its job says `condition: true`.
//!
//! Text that the teacher wrote has no stored noise: this replays ξ from the seed. Every written token must then win in
//! the parallel pass over the whole text. If the arithmetic is the job's, the pass gives the bits with which the text
//! was written. Otherwise logits are off by at most δ = [`LOGPROB_TOLERANCE`], and a token may lose by 2·δ/T
//! ([`Sampler::lead`]). At most a share of 2·δ/T of the tokens has a lead that small, because leads are at least as
//! spread as Exp(1).

use std::path::PathBuf;
use std::sync::Arc;

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::Int32Type;
use rayon::prelude::*;
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_base::events::{Event, Observer};
use stillhouse_base::path_expansion::PathExpander;
use stillhouse_base::path_expansion::local_path;
use stillhouse_engine::teacher::{self, file_sha256};
use stillhouse_hub::{self as hub, FetchPurpose, HubRef};
use stillhouse_noise::{
    Correction, DrawKey, LoadedRow, NoiseAccuracy, NoiseError, NoiseStream, Sampler, Softmax, StoredToken,
    measure_accuracy, measure_dense_accuracy,
};
use stillhouse_operators::config::rows_per_batch;
use stillhouse_operators::extract::pass::{PredictedPosition, Sequence, Slice, TeacherPass};
use stillhouse_operators::extract::{StoredSignals, sequences};
use stillhouse_operators::generate::{GIVEN, sampling};
use stillhouse_operators::invariants::{Widened, float_column, unsigned_column};
use stillhouse_operators::operator::{Counters, OperatorError};
use stillhouse_schemas::columns;
use stillhouse_schemas::manifest::{Manifest, ShardRecord};
use stillhouse_schemas::paths::{Part, parts};
use stillhouse_schemas::spec::{Extract, NoiseCodec, Sequential};
use stillhouse_signals::{LOGPROB_TOLERANCE, StoredSignal, Tolerances};
use stillhouse_teacher::Teacher;

use super::report::{self, LiveComparison, StoredDifferences};
use super::states::States;
use super::{TeacherCheck, Verification, VerifyOptions};
use crate::dataset::Dataset;

/// Number of batches to recompute by default.
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
    let dataset_folder = job_folder.clone();
    let teacher = tokio::task::block_in_place(|| load(dataset, options, extract, job_folder, found))?;
    let seed = manifest.noise_seed.unwrap_or(manifest.job.seed);
    let per_batch = rows_per_batch(&manifest.job);
    let wanted = if options.teacher_batches == 0 { DEFAULT_BATCHES } else { options.teacher_batches };
    let picked = sample_batches(manifest, per_batch, wanted);
    let noise = extract.noise.as_ref();
    let mut check = TeacherCheck {
        tolerance: noise.filter(|n| n.codec == NoiseCodec::Replay).map(|n| n.tolerance),
        condition: noise.is_some_and(|n| n.condition) || manifest.job.sequential().is_some(),
        written: manifest.job.sequential().is_some(),
        ..TeacherCheck::default()
    };
    // on another kind of machine, log-probabilities may differ by the tolerance, and so may the logits of the observed
    // token and its rival
    let alike = report::alike(record, teacher.info());
    if !alike {
        let (was, is) = (&record.arithmetic, &teacher.info().arithmetic);
        let message = format!(
            "the data set was computed in {was} on {}, here it is {is} on {}: what differs by more than {LOGPROB_TOLERANCE} nat may be \
             the arithmetic's",
            record.device,
            teacher.info().device
        );
        observer.event(&Event::Warning { message });
    }
    let tolerances = Tolerances::for_arithmetic(alike, &teacher.info().device);
    let written = manifest.job.sequential();
    let temperature = written.as_ref().map(|w| w.temperature).filter(|t| *t > 0.0).unwrap_or(1.0);
    let mut variation_sum = 0.0;
    let mut stored = StoredDifferences::default();
    let mut comparing = match options.report {
        Some(dtype) => {
            observer.event(&Event::Preparing { what: format!("loading the teacher in {}", dtype.name()) });
            let other = tokio::task::block_in_place(|| {
                let path = path(options, extract, dataset_folder)?;
                teacher::load(&path, &extract.teacher, dtype, manifest.job.pack.length as usize, &teacher.info().device)
            })?;
            Some(LiveComparison::new(&teacher, other, picked.len()))
        }
        None => None,
    };
    let signals = stillhouse_signals::from_job(extract, manifest.job.seed);
    for (shard, offset) in picked {
        observer.event(&Event::Preparing { what: format!("recomputing {} from row {offset}", shard.path) });
        let Some(batch) = dataset.rows(shard, offset, per_batch).await? else { continue };
        let job = Recomputed {
            manifest,
            extract,
            bos: record.bos_token_id,
            teacher: Arc::clone(&teacher),
            lead_slack: if written.is_some() {
                2.0 * tolerances.logit_error() / temperature
            } else {
                tolerances.lead()
            },
            written: written.clone(),
            tolerances,
            signals: &signals,
            place: shard.path.clone(),
            offset,
        };
        tokio::task::block_in_place(|| {
            job.check(&batch, &mut check, &mut variation_sum, &mut stored, found)?;
            comparing.as_mut().map_or(Ok(()), |comparing| comparing.add(&batch, extract, record.bos_token_id, seed))
        })
        .map_err(|e| PipelineError::caused(ErrorKind::Model, dataset.shown(&shard.path), e))?;
    }
    found.report = comparing.map(|comparing| comparing.report(manifest, stored));
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
    let path = path(options, extract, job_folder)?;
    let device = options.device.as_deref().unwrap_or(&extract.teacher.device);
    let dtype = record.and_then(|r| r.dtype).unwrap_or(extract.teacher.dtype);
    let length = dataset.manifest().job.pack.length as usize;
    let teacher = teacher::load(&path, &extract.teacher, dtype, length, device)?;
    for (name, file) in &teacher.info().weights {
        let expected = record.and_then(|r| r.files.get(name));
        let got = file_sha256(file)?;
        if expected != Some(&got) {
            found.fault(file.display().to_string(), format!("sha256 {got} is not that of the job's teacher"));
        }
    }
    Ok(teacher)
}

/// Path of the teacher.
fn path(options: &VerifyOptions, extract: &Extract, job_folder: Option<PathBuf>) -> Result<PathBuf> {
    let path = match &options.teacher_path {
        Some(path) => path.clone(),
        None => teacher_path_of_job(&extract.teacher.path, job_folder)?,
    };
    if path.exists() {
        return Ok(path);
    }
    let message = format!("no teacher at {}, where the job had it; name it with --teacher-path", path.display());
    Err(PipelineError::new(ErrorKind::Usage, message))
}

/// Path at which the job found its teacher. The manifest may come from someone else, so this expands no environment
/// variable in it.
fn teacher_path_of_job(path: &str, job_folder: Option<PathBuf>) -> Result<PathBuf> {
    let is_variable = |part: &Part<'_>| matches!(part, Part::Variable(_));
    if parts(path).is_ok_and(|parts| parts.iter().any(is_variable)) {
        let message = format!("the job had its teacher at {path}; name it with --teacher-path");
        return Err(PipelineError::new(ErrorKind::Usage, message));
    }
    let real = PathExpander::from_environment().expand(path).map_err(|e| PipelineError::new(ErrorKind::Usage, e))?;
    if let Ok(Some(reference)) = HubRef::parse(&real) {
        return Ok(hub::fetch(&reference, FetchPurpose::Teacher, &|_, _, _| {})?.path);
    }
    let there = local_path(&job_folder.unwrap_or_default(), &real);
    let here = PathBuf::from(&real);
    Ok([&there, &here].into_iter().find(|path| path.exists()).unwrap_or(&there).clone())
}

/// Picks batches spread evenly over the rows of the data set. Each begins where a batch of the job began.
fn sample_batches(manifest: &Manifest, per_batch: usize, wanted: usize) -> Vec<(&ShardRecord, usize)> {
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
    lead_slack: f64,
    /// How the teacher wrote the text, if it did.
    written: Option<Sequential>,
    /// Tolerances between stored and recomputed values.
    tolerances: Tolerances,
    signals: &'a [Arc<dyn StoredSignal>],
    place: String,
    offset: usize,
}

/// The stored columns of a batch.
struct Stored {
    logprob: Widened<f32>,
    replay: Option<(Widened<u32>, Widened<u32>, Widened<f32>)>,
    dense: Option<Widened<f32>>,
    /// Number of given positions at the start of each row, if the teacher wrote the rest.
    given: Vec<usize>,
    signals: StoredSignals,
    states: Option<States>,
}

/// Result of checking one token: its log-probability, and the noise of every draw.
struct TokenCheck {
    logprob: f64,
    stored_logprob: f64,
    noises: Vec<NoiseAccuracy>,
    /// Margin by which a written token wins; negative if it loses.
    lead: Option<f64>,
    /// First fault of the signals.
    signals: Option<String>,
}

impl Recomputed<'_> {
    fn check(
        &self,
        batch: &RecordBatch,
        check: &mut TeacherCheck,
        variation_sum: &mut f64,
        side: &mut StoredDifferences,
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
            given: match batch.column_by_name(GIVEN).and_then(|column| column.as_primitive_opt::<Int32Type>()) {
                Some(given) => given.values().iter().map(|n| usize::try_from(*n).unwrap_or(0)).collect(),
                None => vec![0; sequences.len()],
            },
            signals: StoredSignals::read(self.signals, batch).map_err(&arrow)?,
            states: States::of(self.manifest, batch).map_err(&arrow)?,
        };
        let counters = Counters::default();
        let pass = TeacherPass {
            teacher: self.teacher.as_ref(),
            bos: self.bos,
            context: self.extract.context,
            batch_tokens: self.extract.teacher.batch_tokens as usize,
            hidden_layers: stored.states.as_ref().map_or(&[], States::layers),
            meter: &counters,
        };
        let mut predicted: Vec<Vec<bool>> = sequences.iter().map(|s| vec![false; s.tokens.len()]).collect();
        check.sequences += sequences.len() as u64;
        pass.run(&sequences, &mut self.teacher.buffer()?, &mut |Slice { positions, logits, states }| {
            let vocab = self.teacher.info().vocab_size;
            let on_host = logits.on_host()?;
            let results: Result<Vec<TokenCheck>, NoiseError> = positions
                .par_iter()
                .zip(on_host.par_chunks_exact(vocab))
                .map(|(p, logits)| self.check_token(&sequences, &stored, *p, logits))
                .collect();
            let results = results.map_err(|e| OperatorError::Data {
                operator: "verify",
                place: self.place.clone(),
                message: e.to_string(),
            })?;
            for (p, result) in positions.iter().zip(results) {
                // a prompt is given: it is stored with certainty and not checked
                if p.position < stored.given[p.row] {
                    continue;
                }
                predicted[p.row][p.position] = true;
                check.tokens += 1;
                side.logprob_changes.push((result.logprob - result.stored_logprob).abs());
                side.variations.extend(result.noises.iter().map(|noise| noise.total_variation));
                self.record_result(*p, &result, check, variation_sum, found);
            }
            drop(on_host);
            if let Some(states_stored) = &stored.states {
                let of_a_token = states.len() / positions.len().max(1);
                let all = positions.iter().zip(states.chunks_exact(of_a_token));
                for (p, states) in all.filter(|(p, _)| p.position >= stored.given[p.row]) {
                    if let Some(message) = states_stored.find_mismatch(p.row, p.position, states, self.tolerances) {
                        found.fault(self.place_of(*p), message);
                    }
                }
            }
            Ok(logits)
        })?;
        self.check_certain(&sequences, &stored, &predicted, found);
        Ok(())
    }

    fn place_of(&self, p: PredictedPosition) -> String {
        format!("{} row {} position {}", self.place, self.offset + p.row, p.position)
    }

    fn record_result(
        &self,
        p: PredictedPosition,
        result: &TokenCheck,
        check: &mut TeacherCheck,
        sum: &mut f64,
        found: &mut Verification,
    ) {
        let place = || self.place_of(p);
        let difference = (result.logprob - result.stored_logprob).abs();
        check.logprob_difference_max = check.logprob_difference_max.max(difference);
        if difference.is_nan() || difference > self.tolerances.logprob(result.logprob) {
            let (stored, recomputed) = (result.stored_logprob, result.logprob);
            found.fault(place(), format!("logprob is {stored}, recomputed it is {recomputed}: {difference:.3e} apart"));
        }
        if let Some(lead) = result.lead {
            check.noises += 1;
            if lead >= 0.0 {
                check.argmax_hits += 1;
            }
            // the bound documented at `Sampler::lead`
            if lead < -self.lead_slack {
                let lost = if lead == f64::NEG_INFINITY {
                    "is not among those that may be written".into()
                } else {
                    format!("loses by {:.3e}", -lead)
                };
                found.fault(place(), format!("the teacher did not write this token: under the seed's noise it {lost}"));
            }
        }
        if let Some(message) = &result.signals {
            found.fault(place(), message.clone());
        }
        for noise in &result.noises {
            let variation = noise.total_variation;
            check.noises += 1;
            *sum += variation;
            check.total_variation_max = check.total_variation_max.max(variation);
            let limit = check.tolerance.unwrap_or(DENSE_VARIATION) + self.tolerances.variation();
            if variation <= limit {
                check.within_tolerance += 1;
            } else {
                found.fault(place(), format!("total variation {variation:.3e}, valid: at most {limit:.3e}"));
            }
            if noise.lead >= 0.0 {
                check.argmax_hits += 1;
            } else if check.condition && noise.lead < -self.lead_slack {
                let lost = -noise.lead;
                found.fault(
                    place(),
                    format!("the observed token loses in argmax(l + ξ) by {lost:.3e}, as it is stored"),
                );
            }
        }
    }

    fn check_token(
        &self,
        sequences: &[Sequence],
        stored: &Stored,
        p: PredictedPosition,
        logits: &[f32],
    ) -> Result<TokenCheck, NoiseError> {
        let vocab = logits.len();
        let sequence = &sequences[p.row];
        let length = sequence.tokens.len();
        let x = sequence.tokens[p.position];
        let seed = self.manifest.noise_seed.unwrap_or_default();
        let stream = |draw| NoiseStream::new(DrawKey::new(seed, draw), sequence.id, p.position as u32);
        let mut softmax = Softmax::new(vocab)?;
        softmax.load(logits).map_err(|e| e.at(&stream(0)))?;
        let logprob = stored.logprob.row(p.row)[p.position];
        let mut noises = Vec::new();
        for draw in 0..self.extract.noise.as_ref().map_or(0, |noise| noise.draws) {
            let at = draw as usize * length + p.position;
            if let Some((counts, indices, logprobs)) = &stored.replay {
                let counts = counts.row(p.row);
                let start: usize = counts[..at].iter().map(|&c| c as usize).sum();
                let range = start..start + counts[at] as usize;
                let corrections: Vec<Correction> = indices.row(p.row)[range.clone()]
                    .iter()
                    .zip(&logprobs.row(p.row)[range])
                    .map(|(&index, &logprob)| Correction { index, logprob })
                    .collect();
                let token = StoredToken { token: x, logprob, corrections: &corrections };
                noises.push(measure_accuracy(logits, &token, &stream(draw))?);
            } else if let Some(dense) = &stored.dense {
                let xi = &dense.row(p.row)[at * vocab..(at + 1) * vocab];
                noises.push(measure_dense_accuracy(logits, x, xi, &stream(draw))?);
            }
        }
        let lead = match &self.written {
            Some(written) => Some(Sampler::new(vocab, sampling(written))?.lead(
                logits,
                x,
                &stream(0),
                self.tolerances.logit_error(),
            )?),
            None => None,
        };
        let logit = logits.get(x as usize).copied().unwrap_or(f32::NAN);
        let recomputed = LoadedRow::new(&softmax, logits, sequence.id, p.position as u32);
        let signals = stored.signals.find_mismatch(p.row, &recomputed, self.tolerances);
        let logprob_now = softmax.logprob(logit);
        Ok(TokenCheck { signals, logprob: logprob_now, stored_logprob: f64::from(logprob), noises, lead })
    }

    /// Checks that positions without a prediction are stored as certain.
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
                let known = !stored.signals.is_certain(row, position, sequence.tokens[position])
                    || stored.states.as_ref().is_some_and(|s| !s.is_certain(row, position));
                if stored.logprob.row(row)[position] != 0.0 || corrected || known {
                    found.fault(
                        format!("{} row {} position {position}", self.place, self.offset + row),
                        "is given or padding, but is not stored as certain",
                    );
                }
            }
        }
    }
}

/// Bound on the total variation of dense noise in half precision: an error of 2^-11 in ξ changes a weight by 5e-4; ξ up
/// to 22 has an error of 2^-7.
const DENSE_VARIATION: f64 = 2e-2;
