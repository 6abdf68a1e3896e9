//! Continuous batching: each slot holds a text, and a step adds a token to each. As soon as a text ends, its slot takes
//! the next one.
//!
//! ```text
//!   push(batch of prompts) ─► waiting ─► free slots ─► step: logits [slots, V] ─► x, ln p ─► … ─► ended ─► its row in its batch
//!                                             ▲                                                              │
//!                                             └──────────── free slot ◄──────────────────────────────────────┘    complete ─► rows
//! ```
//!
//! A batch is returned as soon as all of its texts have ended, with its rows in the order of their prompts. Its content
//! depends neither on other batches nor on the slots.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{AsArray, RecordBatch, UInt32Array};
use arrow::datatypes::UInt64Type;
use arrow::error::ArrowError;
use rayon::prelude::*;
use stillhouse_noise::{
    DrawKey, Extract, ExtractedColumns, NoiseError, NoiseStream, ObservedTokens, RowExtractor, Sampler,
};
use stillhouse_teacher::{Decoding, StepOutput, Teacher};

use super::rows::{self, GeneratedBatch, Text};
use super::{GenerateConfig, NAME, sampling};
use crate::extract::noise_error;
use crate::operator::{Measure, Meter, OperatorError};
use crate::rows::{ListRows, column, sequence_ids};

/// Texts that wait, that are being written, or that have ended while others of their batch have not.
pub struct BatchedDecoder<'t, T> {
    config: Arc<GenerateConfig>,
    decoding: Box<dyn Decoding + 't>,
    extractor: RowExtractor,
    slots: Vec<Slot>,
    waiting: VecDeque<Text>,
    batches: Vec<Batch<T>>,
    /// Number of batches pushed so far.
    pushed: usize,
    stepped: StepOutput,
}

/// A slot: its text, and the sampler that chooses the text's tokens.
struct Slot {
    text: Option<Text>,
    sampler: Sampler,
}

/// A batch with texts that have not ended.
struct Batch<T> {
    ticket: T,
    number: usize,
    finished: Vec<Text>,
    /// Number of texts that have not ended.
    remaining: usize,
    busy: Duration,
    meter: Arc<dyn Meter>,
}

impl<'t, T> BatchedDecoder<'t, T> {
    /// Creates a decoder with the config's number of slots.
    ///
    /// # Errors
    /// Fails if the teacher cannot decode (as on a GPU), supports no texts of this length, or lacks one of the layers.
    pub fn new(teacher: &'t dyn Teacher, config: Arc<GenerateConfig>) -> Result<Self, OperatorError> {
        let vocab = teacher.info().vocab_size;
        let slots = config.sequential.slots as usize;
        let sampler = Sampler::new(vocab, sampling(&config.sequential)).map_err(noise_error)?;
        Ok(Self {
            decoding: teacher.decoding(slots, config.length(), config.extract.hidden_layers())?,
            extractor: RowExtractor::new(config.extract.extraction()?).map_err(noise_error)?,
            slots: (0..slots).map(|_| Slot { text: None, sampler: sampler.clone() }).collect(),
            waiting: VecDeque::new(),
            batches: Vec::new(),
            pushed: 0,
            stepped: StepOutput::default(),
            config,
        })
    }

    /// Returns the config.
    pub fn config(&self) -> &Arc<GenerateConfig> {
        &self.config
    }

    /// Whether no text waits or is being written.
    pub fn is_idle(&self) -> bool {
        self.batches.is_empty()
    }

    /// Whether more slots are free than texts wait.
    pub fn has_free_slot(&self) -> bool {
        self.waiting.len() < self.slots.iter().filter(|slot| slot.text.is_none()).count()
    }

    /// Adds a batch of prompts; `ticket` is returned with its result.
    ///
    /// # Errors
    /// Returns the ticket and an error if `batch` is not a batch of prompts.
    pub fn push(&mut self, ticket: T, batch: &RecordBatch, meter: Arc<dyn Meter>) -> Result<(), (T, OperatorError)> {
        let number = self.pushed;
        let texts = match read_prompts(batch, number, &self.config) {
            Ok(texts) => texts,
            Err(error) => return Err((ticket, OperatorError::Arrow { operator: NAME, source: error })),
        };
        self.pushed += 1;
        self.waiting.extend(texts);
        let (finished, remaining) = (Vec::new(), batch.num_rows());
        self.batches.push(Batch { ticket, number, finished, remaining, busy: Duration::ZERO, meter });
        Ok(())
    }

    /// Drops the batches for which `is_cancelled` is true; returns their tickets.
    pub fn cancel(&mut self, is_cancelled: impl Fn(&T) -> bool) -> Vec<T> {
        let dropped = self.batches.extract_if(.., |batch| is_cancelled(&batch.ticket)).collect::<Vec<_>>();
        dropped.iter().for_each(|batch| self.drop_texts(batch.number));
        dropped.into_iter().map(|batch| batch.ticket).collect()
    }

    fn drop_texts(&mut self, number: usize) {
        self.waiting.retain(|text| text.batch_and_row.0 != number);
        let slots = self.slots.iter_mut();
        slots
            .filter(|slot| slot.text.as_ref().is_some_and(|text| text.batch_and_row.0 == number))
            .for_each(|slot| slot.text = None);
    }

    /// Adds a token to the text of every slot. Returns the batches that are now complete or have failed.
    pub fn step(&mut self) -> Vec<(T, Result<GeneratedBatch, OperatorError>)> {
        for (number, slot) in self.slots.iter_mut().enumerate() {
            if slot.text.is_none() {
                let Some(text) = self.waiting.pop_front() else { break };
                self.decoding.clear(number);
                slot.text = Some(text);
            }
        }
        if let Err(error) = self.generate_tokens() {
            // if the teacher fails, every batch fails
            let batches = std::mem::take(&mut self.batches);
            self.waiting.clear();
            self.slots.iter_mut().for_each(|slot| slot.text = None);
            let error = Arc::new(error);
            let shared = |batch: Batch<T>| (batch.ticket, Err(OperatorError::Shared(Arc::clone(&error))));
            return batches.into_iter().map(shared).collect();
        }
        self.take_completed()
    }

    /// Adds the next token to the text of every slot. A text with non-finite logits gets an error instead.
    fn generate_tokens(&mut self) -> Result<(), OperatorError> {
        let began = Instant::now();
        let inputs: Vec<(usize, &[u32])> = (self.slots.iter().enumerate())
            .filter_map(|(number, slot)| slot.text.as_ref().map(|text| (number, text.unprocessed())))
            .collect();
        if inputs.is_empty() {
            return Ok(());
        }
        self.decoding.step(&inputs, &mut self.stepped)?;
        let decode_time = began.elapsed();
        let began = Instant::now();
        let (key, vocab) = (DrawKey::new(self.config.seed, 0), self.extractor.spec().vocab);
        let active: Vec<(&mut Text, &mut Sampler)> = (self.slots.iter_mut())
            .filter_map(|Slot { text, sampler }| text.as_mut().map(|text| (text, sampler)))
            .collect();
        let chosen: Vec<Result<u32, NoiseError>> = active
            .into_par_iter()
            .zip(self.stepped.logits.par_chunks_exact_mut(vocab))
            .map(|((text, sampler), logits)| {
                text.mark_processed();
                let stream = NoiseStream::new(key, text.id, text.tokens.len() as u32);
                let chosen = sampler.sample(logits, &stream).map(|(token, _)| token);
                if chosen.is_err() {
                    // only its batch fails; the others continue
                    logits.fill(0.0);
                }
                chosen
            })
            .collect();
        let texts = || self.slots.iter().filter_map(|slot| slot.text.as_ref());
        let tokens: Vec<u32> = chosen.iter().map(|token| *token.as_ref().unwrap_or(&0)).collect();
        let positions: Vec<u32> = texts().map(|text| text.tokens.len() as u32).collect();
        let sequence_ids: Vec<u64> = texts().map(|text| text.id).collect();
        let observed = ObservedTokens { tokens: &tokens, positions: &positions, sequence_ids: &sequence_ids };
        let extracted = self.extractor.extract(&self.stepped.logits, &observed).map_err(noise_error)?;
        self.record_times(decode_time, began.elapsed());
        self.append_tokens(chosen, &extracted);
        Ok(())
    }

    /// Divides the time of a step among the batches by the number of their texts in it.
    fn record_times(&mut self, decode_time: Duration, extract_time: Duration) {
        let texts_in = |number: usize| {
            let texts = self.slots.iter().filter_map(|slot| slot.text.as_ref());
            texts.filter(|text| text.batch_and_row.0 == number).count() as u32
        };
        let all = self.slots.iter().filter(|slot| slot.text.is_some()).count().max(1) as u32;
        let nanos = |time: Duration, texts: u32| u64::try_from((time * texts / all).as_nanos()).unwrap_or(u64::MAX);
        for batch in &mut self.batches {
            let texts = texts_in(batch.number);
            batch.busy += (decode_time + extract_time) * texts / all;
            batch.meter.add(Measure::TeacherNanos, nanos(decode_time, texts));
            batch.meter.add(Measure::ExtractNanos, nanos(extract_time, texts));
            batch.meter.add(Measure::TeacherTokens, u64::from(texts));
        }
    }

    /// Appends its token to every text; frees the slots of texts that have ended.
    fn append_tokens(&mut self, chosen: Vec<Result<u32, NoiseError>>, extracted: &ExtractedColumns) {
        let states_per_text = self.stepped.states.len() / chosen.len().max(1);
        let mut chosen = chosen.into_iter().enumerate();
        for slot in &mut self.slots {
            let Some(text) = &mut slot.text else { continue };
            let Some((row, token)) = chosen.next() else { return };
            let states = &self.stepped.states[row * states_per_text..][..states_per_text];
            let written = token.map_err(noise_error).and_then(|token| {
                text.push_token(token, row, extracted, states)?;
                Ok(self.config.is_end(token) || text.tokens.len() == self.config.length())
            });
            match written {
                Ok(false) => continue,
                Ok(true) => {}
                Err(error) => text.error = Some(error),
            }
            if let Some(text) = slot.text.take()
                && let Some(batch) = self.batches.iter_mut().find(|batch| batch.number == text.batch_and_row.0)
            {
                batch.remaining -= 1;
                batch.meter.add(Measure::Sequences, 1);
                batch.finished.push(text);
            }
        }
    }

    fn take_completed(&mut self) -> Vec<(T, Result<GeneratedBatch, OperatorError>)> {
        let is_completed =
            |batch: &mut Batch<T>| batch.remaining == 0 || batch.finished.iter().any(|text| text.error.is_some());
        let completed: Vec<Batch<T>> = self.batches.extract_if(.., is_completed).collect();
        let mut done = Vec::new();
        for mut batch in completed {
            self.drop_texts(batch.number);
            batch.finished.sort_by_key(|text| text.batch_and_row);
            let failed = batch.finished.iter_mut().find_map(|text| text.error.take());
            let made = failed.map_or_else(|| rows::build_rows(&self.config, &mut batch.finished, batch.busy), Err);
            done.push((batch.ticket, made));
        }
        done
    }
}

/// Returns the texts of a batch of prompts.
fn read_prompts(batch: &RecordBatch, number: usize, config: &GenerateConfig) -> Result<Vec<Text>, ArrowError> {
    let ids = sequence_ids(batch)?;
    let lists = ListRows::from_batch(batch, "prompt")?;
    let prompts = lists.values::<UInt32Array>("prompt")?.values();
    let documents = column(batch, "document_id")?.as_primitive_opt::<UInt64Type>();
    let documents =
        documents.ok_or_else(|| ArrowError::SchemaError("column document_id has not type uint64".into()))?;
    let text = |row: usize| {
        let key = (ids.value(row), documents.value(row));
        let prompt = std::iter::once(config.extract.bos).chain(prompts[lists.range(row)].iter().copied());
        Text::new((number, row), key, prompt, config.extract.hidden.as_ref())
    };
    Ok((0..batch.num_rows()).map(text).collect())
}
