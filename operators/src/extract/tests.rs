use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, BooleanArray, Int32Array, ListArray, RecordBatch, UInt64Array};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{Field, Float32Type, Schema, UInt8Type, UInt16Type};
use candle_core::{Device, Tensor};
use stillhouse_gpu_host::Host;
use stillhouse_noise::{
    Correction, DrawKey, NoiseStream, Softmax, StoredToken, dense_noise, measure_accuracy, measure_dense_accuracy,
};
use stillhouse_schemas::spec::PackMode;
use stillhouse_signals::TopK;
use stillhouse_teacher::{
    Architecture, DeviceLogits, Hidden, HostTeacher, HostTeacherAdapter, Precision, Runs, TeacherInfo, stillhouse_gpu,
};

use super::*;
use crate::config::Chart;
use crate::invariants::{float_column, unsigned_column};
use crate::rows::list_column;

mod hidden;
mod signals;

const VOCAB: usize = 37;
const BOS: u32 = 36;

/// A teacher with equal logits over a large vocabulary.
struct FlatTeacher(TeacherInfo);

impl HostTeacher for FlatTeacher {
    fn info(&self) -> &TeacherInfo {
        &self.0
    }

    fn hidden(&self, _: &[u32], batch: usize, length: usize) -> stillhouse_teacher::Result<Tensor> {
        Ok(Tensor::zeros((batch, length, 1), candle_core::DType::F32, &Device::Cpu)?)
    }

    fn logits(&self, rows: &Tensor) -> stillhouse_teacher::Result<Tensor> {
        Ok(Tensor::zeros((rows.dim(0)?, self.0.vocab_size), candle_core::DType::F32, &Device::Cpu)?)
    }

    fn logits_into(&self, rows: &Tensor, out: &mut Vec<f32>) -> stillhouse_teacher::Result<()> {
        out.clear();
        out.resize(rows.dim(0)? * self.0.vocab_size, 0.0);
        Ok(())
    }
}

/// A teacher whose logits are not finite after the token [`POISON`]; attention spoils all other positions of the pass
/// too.
struct SmearingTeacher(HashTeacher);

const POISON: u32 = 7;

impl HostTeacher for SmearingTeacher {
    fn info(&self) -> &TeacherInfo {
        self.0.info()
    }

    fn hidden(&self, tokens: &[u32], batch: usize, length: usize) -> stillhouse_teacher::Result<Tensor> {
        let sound = self.0.hidden(tokens, batch, length)?.flatten_all()?.to_vec1::<f32>()?;
        let smeared: Vec<f32> = (sound.chunks(length).zip(tokens.chunks(length)))
            .flat_map(|(states, tokens)| {
                let bad = tokens.contains(&POISON);
                states.iter().map(move |&state| if bad { f32::NAN } else { state }).collect::<Vec<_>>()
            })
            .collect();
        Ok(Tensor::from_vec(smeared, (batch, length, 1), &Device::Cpu)?)
    }

    fn logits(&self, rows: &Tensor) -> stillhouse_teacher::Result<Tensor> {
        self.0.logits(rows)
    }

    fn logits_into(&self, rows: &Tensor, out: &mut Vec<f32>) -> stillhouse_teacher::Result<()> {
        self.0.logits_into(rows, out)
    }
}

/// A causal model without weights: the hidden state is a hash of the tokens seen, and the logits are a function of it.
struct HashTeacher(TeacherInfo);

fn seen(tokens: &[u32]) -> f32 {
    let hash = tokens.iter().fold(7u32, |h, &t| (h.wrapping_mul(31).wrapping_add(t + 1)) % 65_521);
    hash as f32
}

fn logits_of(state: f32) -> Vec<f32> {
    (0..VOCAB).map(|k| 4.0 * (state * 0.37 + k as f32 * 1.7).sin()).collect()
}

impl HostTeacher for HashTeacher {
    fn info(&self) -> &TeacherInfo {
        &self.0
    }

    fn hidden(&self, tokens: &[u32], batch: usize, length: usize) -> stillhouse_teacher::Result<Tensor> {
        let states: Vec<f32> =
            tokens.chunks(length).flat_map(|row| (1..=length).map(|n| seen(&row[..n])).collect::<Vec<_>>()).collect();
        Ok(Tensor::from_vec(states, (batch, length, 1), &Device::Cpu)?)
    }

    fn logits(&self, rows: &Tensor) -> stillhouse_teacher::Result<Tensor> {
        let states: Vec<f32> = rows.flatten_all()?.to_vec1()?;
        let n = states.len();
        Ok(Tensor::from_vec(states.into_iter().flat_map(logits_of).collect::<Vec<_>>(), (n, VOCAB), &Device::Cpu)?)
    }

    fn logits_into(&self, rows: &Tensor, out: &mut Vec<f32>) -> stillhouse_teacher::Result<()> {
        *out = self.logits(rows)?.flatten_all()?.to_vec1()?;
        Ok(())
    }
}

/// Where a test keeps the logits.
#[derive(Debug, Clone, Copy)]
enum Place {
    Cpu,
    Device,
}

/// A teacher whose logits are on a device, as the extraction sees it.
struct Uploaded<T>(HostTeacherAdapter<T>, Arc<dyn stillhouse_gpu::Device>);

impl<T: HostTeacher> Teacher for Uploaded<T> {
    fn info(&self) -> &TeacherInfo {
        self.0.info()
    }

    fn slice_rows(&self) -> usize {
        self.0.slice_rows()
    }

    fn buffer(&self) -> stillhouse_teacher::Result<Logits> {
        Ok(Logits::Device(DeviceLogits::new(&self.1, self.slice_rows(), self.info().vocab_size)?))
    }

    fn pass(&self, runs: &Runs) -> stillhouse_teacher::Result<Hidden> {
        self.0.pass(runs)
    }

    fn slice(&self, hidden: &Hidden, tokens: &[u32], logits: &mut Logits) -> stillhouse_teacher::Result<()> {
        let mut on_host = Logits::default();
        self.0.slice(hidden, tokens, &mut on_host)?;
        let Logits::Device(logits) = logits else { panic!("a buffer of the CPU") };
        Ok(logits.fill(&on_host.on_host()?)?)
    }
}

fn context(place: Place) -> SplitContext {
    context_of(place, HashTeacher(info(VOCAB)))
}

fn context_of(place: Place, teacher: impl HostTeacher + 'static) -> SplitContext {
    let teacher: Arc<dyn Teacher> = match place {
        Place::Cpu => Arc::new(HostTeacherAdapter(teacher)),
        Place::Device => Arc::new(Uploaded(HostTeacherAdapter(teacher), Arc::new(Host::new(1)))),
    };
    SplitContext { teacher: Some(teacher), ..crate::testing::context(&crate::testing::gpt2()) }
}

fn info(vocab_size: usize) -> TeacherInfo {
    TeacherInfo {
        architecture: Architecture::named("gpt2").unwrap(),
        vocab_size,
        max_positions: 64,
        hidden_size: 1,
        layers: 0,
        parameters: 0,
        bos_token_id: Some(BOS),
        eos_token_id: Some(BOS),
        weights: Vec::new(),
        dtype: Precision::F32,
        device: "cpu".into(),
        arithmetic: "hash".into(),
    }
}

fn config(context: TeacherContext, noise: Option<NoiseConfig>, topk: usize, rows: RowLength) -> ExtractConfig {
    let topk: Option<Arc<dyn StoredSignal>> = if topk > 0 { Some(Arc::new(TopK { k: topk })) } else { None };
    ExtractConfig {
        vocab_size: VOCAB,
        bos: BOS,
        context,
        batch_tokens: 16,
        noise,
        signals: topk.into_iter().collect(),
        hidden: None,
        rows,
    }
}

fn noise(codec: NoiseCodec, draws: u32, tolerance: f64) -> Option<NoiseConfig> {
    Some(NoiseConfig { codec, tolerance, condition: true, draws, precision: NoisePrecision::F32, seed: 11 })
}

/// Builds a batch from rows of (tokens, document offsets, number of tokens that are not padding).
fn batch(rows: RowLength, data: &[(Vec<u32>, Vec<i32>, usize)], mode: PackMode) -> RecordBatch {
    let lengths: Vec<usize> = data.iter().map(|(tokens, ..)| tokens.len()).collect();
    let ids_field = rows.field(columns::INPUT_IDS, DataType::Int32, None, None);
    let mask_field = rows.field(columns::ATTENTION_MASK, DataType::Boolean, None, None);
    let ids = Int32Array::from_iter_values(data.iter().flat_map(|(tokens, ..)| tokens.iter().map(|&t| t as i32)));
    let mask: BooleanArray = data
        .iter()
        .flat_map(|(tokens, _, valid)| (0..tokens.len()).map(|i| Some(i < *valid)).collect::<Vec<_>>())
        .collect();
    let offsets_field = columns::list_field(columns::DOCUMENT_OFFSETS, DataType::Int32);
    let offsets = ListArray::new(
        Arc::new(Field::new_list_field(DataType::Int32, false)),
        OffsetBuffer::from_lengths(data.iter().map(|(_, offsets, _)| offsets.len())),
        Arc::new(Int32Array::from_iter_values(data.iter().flat_map(|(_, offsets, _)| offsets.iter().copied()))),
        None,
    );
    let sequence_ids = UInt64Array::from_iter_values((0..data.len()).map(|row| (5 << 32) + row as u64));
    let mut fields = vec![columns::sequence_id(), ids_field.clone()];
    let mut arrays: Vec<ArrayRef> =
        vec![Arc::new(sequence_ids), list_column(&ids_field, Arc::new(ids), &lengths).unwrap()];
    if mode == PackMode::Pad {
        arrays.push(list_column(&mask_field, Arc::new(mask), &lengths).unwrap());
        fields.push(mask_field);
    }
    fields.push(offsets_field);
    arrays.push(Arc::new(offsets));
    RecordBatch::try_new(Arc::new(Schema::new(fields)), arrays).unwrap()
}

fn run(
    place: Place,
    config: &ExtractConfig,
    input: &RecordBatch,
) -> (RecordBatch, stillhouse_schemas::manifest::Statistics) {
    let context = context(place);
    let all = run_in(config, &context, input).unwrap();
    (all, context.statistics.lock().clone())
}

fn run_in(config: &ExtractConfig, context: &SplitContext, input: &RecordBatch) -> Result<RecordBatch, OperatorError> {
    let mut out = Vec::new();
    config.build(context)?.process(input, &mut |batch| {
        out.push(batch);
        Ok(())
    })?;
    Ok(arrow::compute::concat_batches(&out[0].schema(), &out).unwrap())
}

/// Returns the ln p of each token of a run (0 if given).
fn expected_logprobs(tokens: &[u32]) -> Vec<f64> {
    let given = tokens[0] == BOS;
    let inputs: Vec<u32> = if given { tokens.to_vec() } else { [&[BOS], tokens].concat() };
    (0..tokens.len())
        .map(|i| {
            if given && i == 0 {
                return 0.0;
            }
            let logits = logits_of(seen(&inputs[..if given { i } else { i + 1 }]));
            let mut softmax = Softmax::new(VOCAB).unwrap();
            softmax.load(&logits).unwrap();
            softmax.logprob(logits[tokens[i] as usize])
        })
        .collect()
}

fn assert_close(got: &[f32], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!((f64::from(*g) - e).abs() < 1e-5, "position {i}: got {g}, expected {e}");
    }
}

fn a_leading_bos_is_given_and_a_missing_one_is_put_before(place: Place) {
    let with = vec![BOS, 3, 4, 5, 9, 1];
    let without = vec![3, 4, 5, 9, 1, 2];
    let rows = RowLength::Fixed(6);
    let input = batch(rows, &[(with.clone(), vec![0], 6), (without.clone(), vec![0], 6)], PackMode::Wrap);
    let (out, statistics) = run(place, &config(TeacherContext::Sequence, None, 0, rows), &input);
    let logprob = float_column(&out, columns::LOGPROB).unwrap();
    assert_close(logprob.row(0), &expected_logprobs(&with));
    assert_close(logprob.row(1), &expected_logprobs(&without));
    assert_eq!(statistics.predicted_tokens, 11);
    let sum: f64 = expected_logprobs(&with).iter().chain(&expected_logprobs(&without)).sum();
    assert!((statistics.logprob_sum - sum).abs() < 1e-4);
}

fn the_context_of_a_document_ends_where_it_begins(place: Place) {
    let tokens = vec![BOS, 3, 4, 5, 9, 1, 2, 8];
    let rows = RowLength::Fixed(8);
    let input = batch(rows, &[(tokens.clone(), vec![0, 3, 4], 8)], PackMode::Wrap);
    let (out, _) = run(place, &config(TeacherContext::Document, noise(NoiseCodec::Replay, 2, 1e-3), 0, rows), &input);
    let expected: Vec<f64> =
        [&tokens[..3], &tokens[3..4], &tokens[4..]].iter().flat_map(|run| expected_logprobs(run)).collect();
    assert_close(float_column(&out, columns::LOGPROB).unwrap().row(0), &expected);
}

fn padding_is_certain(place: Place) {
    let tokens = vec![3, 4, 5, 0, 0, 0];
    let rows = RowLength::Fixed(6);
    let input = batch(rows, &[(tokens.clone(), vec![0], 3)], PackMode::Pad);
    let (out, statistics) =
        run(place, &config(TeacherContext::Sequence, noise(NoiseCodec::Replay, 1, 1e-4), 2, rows), &input);
    let mut expected = expected_logprobs(&tokens[..3]);
    expected.extend([0.0; 3]);
    assert_close(float_column(&out, columns::LOGPROB).unwrap().row(0), &expected);
    assert_eq!(unsigned_column(&out, columns::NOISE_COUNT).unwrap().row(0)[3..], [0, 0, 0]);
    let topk = float_column(&out, columns::TOPK_LOGPROB).unwrap();
    assert_eq!(topk.row(0)[6..], [0.0, f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY]);
    assert_eq!(statistics.predicted_tokens, 3);
}

/// Returns the logits of a predicted position, computed from the definition.
fn logits_at(tokens: &[u32], position: usize) -> Vec<f32> {
    let inputs: Vec<u32> = if tokens[0] == BOS { tokens.to_vec() } else { [&[BOS], tokens].concat() };
    logits_of(seen(&inputs[..if tokens[0] == BOS { position } else { position + 1 }]))
}

fn corrections_of_every_draw_are_where_the_counts_say(place: Place) {
    let tolerance = 1e-4;
    let rows = RowLength::UpTo(7);
    let data = [(vec![BOS, 3, 4, 5, 9, 1, 2], vec![0], 7), (vec![8, 8, 1, 30], vec![0], 4)];
    let input = batch(rows, &data, PackMode::Wrap);
    let (out, statistics) =
        run(place, &config(TeacherContext::Sequence, noise(NoiseCodec::Replay, 3, tolerance), 0, rows), &input);
    let (counts, indices) =
        (unsigned_column(&out, columns::NOISE_COUNT).unwrap(), unsigned_column(&out, columns::NOISE_INDEX).unwrap());
    let (values, logprobs) =
        (float_column(&out, columns::NOISE_LOGPROB).unwrap(), float_column(&out, columns::LOGPROB).unwrap());
    let mut total = 0;
    for (row, (tokens, ..)) in data.iter().enumerate() {
        let mut at = 0;
        for draw in 0..3 {
            for position in 0..tokens.len() {
                let n = counts.row(row)[draw * tokens.len() + position] as usize;
                let corrections: Vec<Correction> = (at..at + n)
                    .map(|i| Correction { index: indices.row(row)[i], logprob: values.row(row)[i] })
                    .collect();
                at += n;
                if position == 0 && tokens[0] == BOS {
                    assert_eq!(n, 0);
                    continue;
                }
                let stored = StoredToken {
                    token: tokens[position],
                    logprob: logprobs.row(row)[position],
                    corrections: &corrections,
                };
                let stream = NoiseStream::new(DrawKey::new(11, draw as u32), (5 << 32) + row as u64, position as u32);
                let accuracy = measure_accuracy(&logits_at(tokens, position), &stored, &stream).unwrap();
                let within = accuracy.total_variation <= tolerance && accuracy.lead > 0.0;
                assert!(within, "row {row} draw {draw} position {position}: {accuracy:?}");
            }
        }
        assert_eq!(at, indices.row(row).len());
        total += at as u64;
    }
    assert!(total > 50);
    assert_eq!(statistics.corrections, total);
    assert_eq!(statistics.corrections_histogram.iter().sum::<u64>(), 3 * (6 + 4));
    assert!(
        out.column_by_name(columns::NOISE_COUNT)
            .unwrap()
            .as_list::<i32>()
            .values()
            .as_primitive_opt::<UInt8Type>()
            .is_some()
    );
    assert!(
        out.column_by_name(columns::NOISE_INDEX)
            .unwrap()
            .as_list::<i32>()
            .values()
            .as_primitive_opt::<UInt16Type>()
            .is_some()
    );
}

fn dense_noise_and_top_k_are_those_of_the_definition(place: Place) {
    let tokens = vec![4, 3, 4, 5];
    let rows = RowLength::Fixed(4);
    let input = batch(rows, &[(tokens.clone(), vec![0], 4), (vec![BOS, 1, 2, 3], vec![0], 4)], PackMode::Wrap);
    let (out, _) =
        run(place, &config(TeacherContext::Sequence, noise(NoiseCodec::Dense, 2, 1e-3), VOCAB, rows), &input);
    let dense = float_column(&out, columns::NOISE).unwrap();
    assert_eq!(dense.row(0).len(), 2 * 4 * VOCAB);
    let topk = out.column_by_name(columns::TOPK_LOGPROB).unwrap().as_fixed_size_list().value(0);
    let topk = topk.as_primitive::<Float32Type>().values().to_vec();
    for position in 0..4 {
        let logits = logits_at(&tokens, position);
        let mut softmax = Softmax::new(VOCAB).unwrap();
        let mut xi = vec![0.0; VOCAB];
        for draw in 0..2 {
            let stream = NoiseStream::new(DrawKey::new(11, draw as u32), 5 << 32, position as u32);
            dense_noise(&mut softmax, &logits, tokens[position], &stream, &mut xi).unwrap();
            assert_eq!(dense.row(0)[(draw * 4 + position) * VOCAB..][..VOCAB], xi);
        }
        let sum: f64 = topk[position * VOCAB..][..VOCAB].iter().map(|l| f64::from(*l).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-5);
        assert!(topk[position * VOCAB..][..VOCAB].is_sorted_by(|a, b| a >= b));
    }
    // the given first token of row 1 has prior noise, not zeros
    assert!(dense.row(1)[..VOCAB].iter().all(|xi| *xi != 0.0));
}

fn a_teacher_of_another_vocabulary_is_refused(place: Place) {
    let mut config = config(TeacherContext::Sequence, None, 0, RowLength::Fixed(4));
    config.vocab_size = 36;
    let error = config.build(&context(place)).err().unwrap().to_string();
    assert_eq!(error, "extract: the teacher has 37 vocabulary entries, the job 36");
}

/// Tests dense noise in half precision, with enough tokens that rounding to nearest would make some observed token
/// lose.
fn the_observed_token_wins_in_dense_noise_as_it_is_stored(place: Place) {
    let tokens: Vec<u32> = (0..60).map(|i| (i * 7 + i / 5) % 36).collect();
    let rows = RowLength::Fixed(60);
    let data: Vec<_> = (0..4).map(|_| (tokens.clone(), vec![0], 60)).collect();
    let input = batch(rows, &data, PackMode::Wrap);
    let mut lost = [0, 0];
    for (i, condition) in [true, false].into_iter().enumerate() {
        let half =
            NoiseConfig { precision: NoisePrecision::F16, condition, ..noise(NoiseCodec::Dense, 48, 1e-3).unwrap() };
        let (out, _) = run(place, &config(TeacherContext::Sequence, Some(half), 0, rows), &input);
        let dense = float_column(&out, columns::NOISE).unwrap();
        for row in 0..4 {
            for (at, xi) in dense.row(row).chunks(VOCAB).enumerate() {
                let (draw, position) = (at / 60, at % 60);
                let stream = NoiseStream::new(DrawKey::new(11, draw as u32), (5 << 32) + row as u64, position as u32);
                let accuracy =
                    measure_dense_accuracy(&logits_at(&tokens, position), tokens[position], xi, &stream).unwrap();
                assert!(accuracy.total_variation < 2e-2, "{accuracy:?}");
                lost[i] += i32::from(accuracy.lead < 0.0);
            }
        }
    }
    println!("lost of {}: {lost:?}", 4 * 60 * 48);
    assert!(lost[0] == 0 && lost[1] > 0, "{lost:?}");
}

/// Tests that counts above 16 bits work: equal logits, a large vocabulary, a small tolerance and a large e_0.
fn more_corrections_than_two_bytes_count(place: Place) {
    let vocab = 151_936;
    let (tolerance, id) = (2e-5, 5u64 << 32);
    let stream = |seed| NoiseStream::new(DrawKey::new(seed, 0), id, 0);
    let seed = (0u64..).find(|&seed| stream(seed).auxiliary_exponential() > 13.0).unwrap();
    let noise =
        NoiseConfig { precision: NoisePrecision::F16, seed, ..noise(NoiseCodec::Replay, 1, tolerance).unwrap() };
    let rows = RowLength::Fixed(1);
    let wide = ExtractConfig { vocab_size: vocab, ..config(TeacherContext::Sequence, Some(noise), 0, rows) };
    let input = batch(rows, &[(vec![3], vec![0], 1)], PackMode::Wrap);
    let out = run_in(&wide, &context_of(place, FlatTeacher(info(vocab))), &input).unwrap();
    let values = out.column_by_name(columns::NOISE_COUNT).unwrap().as_fixed_size_list().values().clone();
    let count = values.as_primitive::<arrow::datatypes::UInt32Type>().value(0);
    assert!(count > 65_535, "{count}");
    let (indices, logprobs) =
        (unsigned_column(&out, columns::NOISE_INDEX).unwrap(), float_column(&out, columns::NOISE_LOGPROB).unwrap());
    let corrections: Vec<Correction> =
        (indices.row(0).iter().zip(logprobs.row(0))).map(|(&index, &logprob)| Correction { index, logprob }).collect();
    assert_eq!(corrections.len(), count as usize);
    let logprob = float_column(&out, columns::LOGPROB).unwrap().row(0)[0];
    let stored = StoredToken { token: 3, logprob, corrections: &corrections };
    let accuracy = measure_accuracy(&vec![0.0; vocab], &stored, &stream(seed)).unwrap();
    assert!(accuracy.total_variation <= tolerance && accuracy.lead > 0.0, "{accuracy:?}");
}

fn a_logit_that_is_no_number_names_the_position_that_went_wrong_first(place: Place) {
    let rows = RowLength::Fixed(9);
    // the rows before it are correct; its first wrong prediction is that of the token after the poison
    let data = [
        (vec![1, 2, 3, 4, 5, 6, 8, 9, 10], vec![0], 9),
        (vec![1, 2, 3, 4, POISON, 6, 8, 9, 10], vec![0, 3], 9),
        (vec![BOS, POISON, 3, 4, 5, 6, 8, 9, 10], vec![0], 9),
    ];
    let input = |first: usize| batch(rows, &data[first..first + 2], PackMode::Wrap);
    let context = context_of(place, SmearingTeacher(HashTeacher(info(VOCAB))));
    let noises = [None, noise(NoiseCodec::Replay, 1, 1e-3), noise(NoiseCodec::Dense, 1, 1e-3)];
    for noise in noises {
        for seen in [TeacherContext::Sequence, TeacherContext::Document] {
            let config = config(seen, noise.clone(), 0, rows);
            let error = run_in(&config, &context, &input(0)).unwrap_err();
            let expected = (5u64 << 32) + 1;
            let OperatorError::NotFinite { sequence_id, position, token: 0, value } = error else { panic!("{error}") };
            assert_eq!((sequence_id, position, value.is_nan()), (expected, 5, true));
        }
        let error = run_in(&config(TeacherContext::Sequence, noise, 0, rows), &context, &input(2 - 1)).unwrap_err();
        let said = error.to_string();
        assert!(
            said.starts_with("extract: sequence 21474836480, position 5: the teacher's logit of token 0 is NaN;"),
            "{said}"
        );
    }
    let last = batch(rows, &data[2..], PackMode::Wrap);
    let error = run_in(&config(TeacherContext::Sequence, None, 0, rows), &context, &last).unwrap_err();
    assert!(matches!(error, OperatorError::NotFinite { position: 2, .. }), "{error}");
}

/// Runs every test of this file with the logits in memory and on a device.
macro_rules! in_both_places {
    ($($name:ident),+ $(,)?) => {
        mod on_the_cpu {
            $(#[test] fn $name() { super::$name(super::Place::Cpu); })+
        }
        mod on_a_device {
            $(#[test] fn $name() { super::$name(super::Place::Device); })+
        }
    };
}

in_both_places! {
    a_leading_bos_is_given_and_a_missing_one_is_put_before,
    the_context_of_a_document_ends_where_it_begins,
    padding_is_certain,
    corrections_of_every_draw_are_where_the_counts_say,
    dense_noise_and_top_k_are_those_of_the_definition,
    a_teacher_of_another_vocabulary_is_refused,
    the_observed_token_wins_in_dense_noise_as_it_is_stored,
    more_corrections_than_two_bytes_count,
    a_logit_that_is_no_number_names_the_position_that_went_wrong_first,
}
