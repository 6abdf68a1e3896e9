//! Tests text of small teachers: against numpy, with any number of slots, beside texts that fail, and with damaged
//! rows.

use std::collections::BTreeSet;

use arrow::array::{AsArray, Int32Array};
use arrow::datatypes::{Float32Type, Int32Type, UInt64Type};
use serde::Deserialize;
use serde_json::json;
use stillhouse_noise::{Softmax, keyed_uniforms};
use stillhouse_schemas::columns;
use stillhouse_schemas::manifest::SpecialToken;
use stillhouse_schemas::spec::{JobSpec, SpecialTokens};
use stillhouse_teacher::{
    Architecture, Decoding, DeviceChoice, Hidden, LoadOptions, Logits, Precision, Runs, StepOutput, TeacherError, load,
};

use super::*;
use crate::config::{JobContext, OperatorConfig, SpecialIds};
use crate::extract::{BatchForward, ColumnBuilder, Workspace, sequences};
use crate::invariants::CheckContext;
use crate::operator::{Counters, Measure};
use crate::rows::ListRows;
use crate::testing::{context, documents, drive, gpt2, repository, statistics};
use crate::tokenize::TokenizeConfig;

mod signals;

fn config(written: serde_json::Value, vocab_size: usize, ids: [u32; 2], length: usize) -> GenerateConfig {
    asking(json!({}), written, vocab_size, ids, length)
}

/// A config with more keys of `extract`; its teacher's states are [`WIDTH`] wide.
fn asking(
    more: serde_json::Value,
    written: serde_json::Value,
    vocab_size: usize,
    [bos, eos]: [u32; 2],
    length: usize,
) -> GenerateConfig {
    let mut extract = json!({"teacher": {"path": "t"}, "topk": 2, "mode": "sequential", "sequential": written});
    extract.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let mut spec: JobSpec = serde_json::from_value(json!({
        "version": 1, "name": "small", "seed": 42, "input": {"format": "text", "paths": ["x"]},
        "pack": {"length": length, "mode": "pad"}, "extract": extract, "output": {"path": "out"}
    }))
    .unwrap();
    if let Some(states) = &mut spec.extract.as_mut().unwrap().hidden_states {
        states.width = Some(WIDTH as u32);
    }
    let token = |(role, id): (&str, u32)| (role.to_owned(), SpecialToken { token: role.into(), id });
    let special_ids =
        SpecialIds::from_manifest(&[("bos", bos), ("eos", eos), ("pad", eos)].map(token).into(), SpecialTokens::Text);
    GenerateConfig::from_job(&JobContext { spec: &spec, vocab_size, special_ids }).unwrap().unwrap()
}

/// Builds a batch of prompts like the operator `prompts`.
fn prompts(of: &[(u64, Vec<u32>)]) -> RecordBatch {
    let lengths: Vec<usize> = of.iter().map(|(_, prompt)| prompt.len()).collect();
    let tokens: Vec<u32> = of.iter().flat_map(|(_, prompt)| prompt.clone()).collect();
    let (schema, tokens) = (super::prompts::schema(), Arc::new(arrow::array::UInt32Array::from(tokens)));
    let list = crate::rows::list_column(schema.field(2), tokens, &lengths).unwrap();
    let ids = || Arc::new(arrow::array::UInt64Array::from_iter_values(of.iter().map(|(id, _)| *id)));
    RecordBatch::try_new(schema, vec![ids(), ids(), list]).unwrap()
}

/// Runs all batches through one decoder. Returns each batch's number and result, in the order in which they finished.
fn write(teacher: &dyn Teacher, config: &GenerateConfig, batches: &[RecordBatch]) -> Vec<(usize, RecordBatch)> {
    let mut decoder = BatchedDecoder::new(teacher, Arc::new(config.clone())).unwrap();
    let (mut waiting, mut done) = (batches.iter().enumerate(), Vec::new());
    loop {
        while decoder.has_free_slot()
            && let Some((number, batch)) = waiting.next()
        {
            decoder.push(number, batch, Arc::new(Counters::default())).map_err(|(_, e)| e).unwrap();
        }
        if decoder.is_idle() {
            return done;
        }
        done.extend(decoder.step().into_iter().map(|(number, written)| (number, written.unwrap().batch)));
    }
}

/// Returns the texts of a batch.
fn texts(batch: &RecordBatch) -> Vec<Vec<u32>> {
    sequences(batch).unwrap().into_iter().map(|s| s.tokens[..s.valid].to_vec()).collect()
}

#[derive(Deserialize)]
struct Golden {
    name: String,
    seed: u64,
    ids: Vec<u64>,
    prompt: Vec<u32>,
    temperature: f64,
    top_k: u32,
    top_p: f64,
    stop: String,
    length: usize,
    texts: Vec<Vec<u32>>,
}

fn nano() -> Box<dyn Teacher> {
    let options = LoadOptions { device: DeviceChoice::Cpu, dtype: Precision::F32, ..LoadOptions::default() };
    load(&repository("assets/teacher-nano-gpt2"), &options).unwrap()
}

/// The text equals numpy's Gumbel-max (`scripts/written-goldens`), token for token, for any number of slots. The
/// teacher's columns equal those of a pass over the finished text, bit for bit.
#[test]
fn text_is_that_of_an_independent_program() {
    let text = std::fs::read_to_string(repository("operators/testdata/written.json")).unwrap();
    let (goldens, teacher): (Vec<Golden>, _) = (serde_json::from_str(&text).unwrap(), nano());
    assert!(goldens.iter().any(|golden| golden.texts.iter().any(|text| text.len() < golden.length)), "none ends");
    for golden in goldens {
        let Golden { temperature, top_k, top_p, stop, .. } = &golden;
        for slots in [1, 3] {
            let written = json!({
                "temperature": temperature, "top_k": top_k, "top_p": top_p, "stop": stop, "slots": slots,
                "prompt_tokens": golden.prompt.len()
            });
            let mut config = config(written, 50_257, [50_256; 2], golden.length);
            config.seed = golden.seed;
            let of: Vec<_> = golden.ids.iter().map(|id| (*id, golden.prompt.clone())).collect();
            let made = write(teacher.as_ref(), &config, &[prompts(&of)]).remove(0).1;
            assert_eq!(texts(&made), golden.texts, "{} in {slots} slots", golden.name);
            let given = made.column_by_name(GIVEN).unwrap().as_primitive::<Int32Type>();
            assert!(given.values().iter().all(|n| *n as usize == 1 + golden.prompt.len()));
            if slots == 3 {
                check_against_pass(teacher.as_ref(), &config, &made);
            }
        }
    }
}

/// Checks the teacher's columns against `extract` over the written rows.
fn check_against_pass(teacher: &dyn Teacher, config: &GenerateConfig, made: &RecordBatch) {
    let meter: Arc<dyn Meter> = Arc::new(Counters::default());
    let forward = BatchForward::new(&Arc::new(config.extract.clone()), made, meter).unwrap();
    let packed = made.project(&(0..made.num_columns() - 3).collect::<Vec<_>>()).unwrap();
    let (mut columns, mut workspace): (ColumnBuilder, _) = (forward.columns(packed).unwrap(), Workspace::default());
    let given = made.column_by_name(GIVEN).unwrap().as_primitive::<Int32Type>();
    let ran = forward.run(teacher, &mut teacher.buffer().unwrap(), &mut |slice| {
        let extracted = columns.extract(&slice, &mut workspace)?;
        // prompts are given
        for (n, p) in slice.positions.iter().enumerate().filter(|(_, p)| p.position >= given.value(p.row) as usize) {
            let (logprob, signals) = (vec![extracted.logprob[n]], vec![extracted.signals[n].clone()]);
            let one = stillhouse_noise::ExtractedColumns { logprob, signals, ..Default::default() };
            columns.store(&[*p], one, &[])?;
        }
        Ok(slice.logits)
    });
    ran.unwrap();
    let (want, statistics) = columns.finish().unwrap();
    assert!(statistics.predicted_tokens > 0);
    assert_eq!(*made, want);
}

/// A teacher whose logits are a function of the last token and not finite after [`POISON`]; its states are
/// [`chain_states`].
struct Chain(TeacherInfo);

const VOCAB: usize = 23;
const BOS: u32 = 21;
const EOS: u32 = 22;
const POISON: u32 = 20;
/// After this token the states are too large for f16.
const WIDE: u32 = 19;
/// Width of the nano teacher's states.
const WIDTH: usize = 64;

impl Chain {
    fn new() -> Self {
        Self(TeacherInfo {
            architecture: Architecture::named("gpt2").unwrap(),
            vocab_size: VOCAB,
            max_positions: 64,
            hidden_size: WIDTH,
            layers: 1,
            parameters: 0,
            bos_token_id: None,
            eos_token_id: None,
            weights: Vec::new(),
            dtype: Precision::F32,
            device: "cpu".into(),
            arithmetic: "f32".into(),
        })
    }
}

fn chain_logits(token: u32) -> Vec<f32> {
    let mut uniforms = keyed_uniforms(u64::from(token), "chain", 0, 0);
    let logit = |_| if token == POISON { f32::NAN } else { (6.0 * uniforms.next_f64()) as f32 };
    let mut logits: Vec<f32> = (0..VOCAB).map(logit).collect();
    // never written; only a prompt contains it
    for given in [POISON, WIDE] {
        logits[given as usize] = logits[given as usize].min(-1e4);
    }
    logits
}

/// Returns the states of layers after the first `seen` tokens of a text; `token` is the last of them.
fn chain_states(layers: &[usize], token: u32, seen: usize) -> Vec<f32> {
    let of_layer = |layer: &usize| {
        let first = if token == WIDE && *layer == 1 { 7e4 } else { (100 * layer) as f32 + token as f32 };
        let mut state = vec![0.25; WIDTH];
        (state[0], state[1]) = (first, seen as f32);
        state
    };
    layers.iter().flat_map(of_layer).collect()
}

impl Teacher for Chain {
    fn info(&self) -> &TeacherInfo {
        &self.0
    }

    fn slice_rows(&self) -> usize {
        8
    }

    fn buffer(&self) -> stillhouse_teacher::Result<Logits> {
        Ok(Logits::default())
    }

    fn pass(&self, _: &Runs) -> stillhouse_teacher::Result<Hidden> {
        panic!("a text that is written needs no pass")
    }

    fn slice(&self, _: &Hidden, _: &[u32], _: &mut Logits) -> stillhouse_teacher::Result<()> {
        panic!("a text that is written needs no slice")
    }

    fn decoding(
        &self,
        slots: usize,
        length: usize,
        layers: &[usize],
    ) -> stillhouse_teacher::Result<Box<dyn Decoding + '_>> {
        Ok(Box::new(ChainSlots { seen: vec![0; slots], length, layers: layers.to_vec() }))
    }
}

struct ChainSlots {
    seen: Vec<usize>,
    length: usize,
    layers: Vec<usize>,
}

impl Decoding for ChainSlots {
    fn bytes(&self) -> usize {
        0
    }

    fn clear(&mut self, slot: usize) {
        self.seen[slot] = 0;
    }

    fn step(&mut self, inputs: &[(usize, &[u32])], out: &mut StepOutput) -> stillhouse_teacher::Result<()> {
        out.logits.clear();
        out.states.clear();
        for (slot, tokens) in inputs {
            let begins = self.seen[*slot] == 0;
            assert!(!begins || tokens[0] == BOS, "a text begins with bos");
            assert!(begins || tokens.len() == 1, "a slot is cleared before a text begins in it");
            self.seen[*slot] += tokens.len();
            if self.seen[*slot] >= self.length {
                let (got, valid) = (self.seen[*slot].to_string(), format!("below {}", self.length));
                return Err(TeacherError::Input { what: "tokens seen", got, valid });
            }
            let last = tokens[tokens.len() - 1];
            out.logits.extend(chain_logits(last));
            out.states.extend(chain_states(&self.layers, last, self.seen[*slot]));
        }
        Ok(())
    }
}

fn chain_config(written: serde_json::Value, length: usize) -> GenerateConfig {
    config(written, VOCAB, [BOS, EOS], length)
}

/// Three batches of prompts of several lengths.
fn chain_prompts() -> Vec<RecordBatch> {
    let of = |from: u64, n: u64| -> Vec<_> {
        (from..from + n).map(|id| (id, vec![id as u32 % 20; id as usize % 4])).collect()
    };
    vec![prompts(&of(0, 9)), prompts(&of(9, 1)), prompts(&of(10, 14))]
}

#[test]
fn batches_share_slots_and_do_not_know_of_each_other() {
    let teacher = Chain::new();
    let alone: Vec<RecordBatch> = chain_prompts()
        .iter()
        .map(|batch| {
            write(&teacher, &chain_config(json!({"prompt_tokens": 3, "slots": 1}), 24), std::slice::from_ref(batch))
                .remove(0)
                .1
        })
        .collect();
    let lengths: BTreeSet<usize> = alone.iter().flat_map(texts).map(|text| text.len()).collect();
    assert!(lengths.len() > 8 && lengths.contains(&24), "texts that end at many places: {lengths:?}");
    for slots in [2, 5, 16, 100] {
        let config = chain_config(json!({"prompt_tokens": 3, "slots": slots}), 24);
        let together = write(&teacher, &config, &chain_prompts());
        assert_eq!(together.len(), 3);
        for (number, batch) in &together {
            assert_eq!(*batch, alone[*number], "{slots} slots");
        }
        let limits = CheckContext {
            vocab_size: VOCAB,
            length: 24,
            split: stillhouse_schemas::ids::SplitId(0),
            sequence_range: None,
        };
        let mut violations = Vec::new();
        together.iter().for_each(|(_, batch)| OperatorConfig::check(&config, batch, &limits, &mut violations).unwrap());
        assert_eq!(violations, []);
    }
    // the second batch, with one text, is complete before the first
    let order: Vec<usize> =
        write(&teacher, &chain_config(json!({"slots": 10}), 24), &chain_prompts()).iter().map(|(n, _)| *n).collect();
    assert_eq!(order.len(), 3);
}

/// A free slot takes the next text at once: texts of n_i tokens in s slots need no more steps than a list schedule.
#[test]
fn no_slot_waits_while_texts_do() {
    let (teacher, slots) = (Chain::new(), 4);
    let config = Arc::new(chain_config(json!({"prompt_tokens": 3, "slots": slots}), 24));
    let mut decoder = BatchedDecoder::new(&teacher, config).unwrap();
    let batch = &chain_prompts()[2];
    let counters = Arc::new(Counters::default());
    decoder.push((), batch, Arc::clone(&counters) as Arc<dyn Meter>).unwrap_or_else(|_| panic!("prompts"));
    let (mut steps, mut made) = (0, None);
    while !decoder.is_idle() {
        made = decoder.step().pop();
        steps += 1;
    }
    let written = made.unwrap().1.unwrap();
    let given = written.batch.column_by_name(GIVEN).unwrap().as_primitive::<Int32Type>();
    let lengths: Vec<usize> =
        texts(&written.batch).iter().zip(given.values()).map(|(t, g)| t.len() - *g as usize).collect();
    let mut ends = vec![0; slots];
    for length in &lengths {
        *ends.iter_mut().min().unwrap() += length;
    }
    assert_eq!(steps, ends.into_iter().max().unwrap(), "{lengths:?}");
    let all: usize = lengths.iter().sum();
    assert_eq!(counters.get(Measure::TeacherTokens), all as u64);
    assert_eq!(counters.get(Measure::Sequences), 14);
    assert_eq!(written.statistics.predicted_tokens, all as u64);
}

/// The log-probabilities match the samples: mean ln p is minus the mean entropy, within four standard errors.
#[test]
fn the_mean_log_probability_of_text_is_its_entropy() {
    let teacher = Chain::new();
    let of: Vec<_> = (0..400).map(|id| (id, Vec::new())).collect();
    let made = write(&teacher, &chain_config(json!({"stop": "length"}), 32), &[prompts(&of)]).remove(0).1;
    let lists = ListRows::from_batch(&made, columns::LOGPROB).unwrap();
    let logprobs = lists.all_values().as_primitive::<Float32Type>().values();
    let (mut softmax, mut off, mut variance, mut n) = (Softmax::new(VOCAB).unwrap(), 0.0, 0.0, 0);
    for (row, text) in texts(&made).iter().enumerate() {
        for (position, pair) in text.windows(2).enumerate() {
            let logits = chain_logits(pair[0]);
            softmax.load(&logits).unwrap();
            let (mut mean, mut square) = (0.0, 0.0);
            for logit in &logits {
                let ln = softmax.logprob(*logit);
                mean += ln.exp() * ln;
                square += ln.exp() * ln * ln;
            }
            off += f64::from(logprobs[lists.range(row).start + position + 1]) - mean;
            variance += square - mean * mean;
            n += 1;
        }
    }
    assert_eq!(n, 400 * 31);
    assert!(off.abs() < 4.0 * variance.sqrt() && variance > 1000.0, "{off} of {}", variance.sqrt());
    // as T falls, every token becomes the likeliest one
    let cold = |written| texts(&write(&teacher, &chain_config(written, 32), &[prompts(&of[..20])]).remove(0).1);
    let greedy = cold(json!({"stop": "length", "temperature": 0}));
    assert_eq!(greedy, cold(json!({"stop": "length", "temperature": 1e-6})));
    let argmax = |token: u32| {
        let logits = chain_logits(token);
        (0..VOCAB as u32).rev().max_by(|a, b| logits[*a as usize].total_cmp(&logits[*b as usize])).unwrap()
    };
    assert!(greedy.iter().all(|text| text.windows(2).all(|pair| pair[1] == argmax(pair[0]))));
    assert_ne!(greedy, cold(json!({"stop": "length"})));
}

#[test]
fn a_text_that_goes_wrong_takes_its_batch_along_and_no_other() {
    let teacher = Chain::new();
    let config = Arc::new(chain_config(json!({"prompt_tokens": 3, "slots": 3}), 24));
    let mut decoder = BatchedDecoder::new(&teacher, Arc::clone(&config)).unwrap();
    let [first, _, third] = <[RecordBatch; 3]>::try_from(chain_prompts()).unwrap();
    let poisoned = prompts(&[(50, vec![1]), (51, vec![2, POISON]), (52, vec![3])]);
    for (ticket, batch) in [("first", &first), ("poisoned", &poisoned), ("gone", &first), ("third", &third)] {
        decoder.push(ticket, batch, Arc::new(Counters::default())).unwrap_or_else(|_| panic!("prompts"));
    }
    assert_eq!(decoder.cancel(|ticket| *ticket == "gone"), ["gone"]);
    let (mut made, mut failed) = (Vec::new(), Vec::new());
    while !decoder.is_idle() {
        for (ticket, written) in decoder.step() {
            match written {
                Ok(written) => made.push((ticket, written.batch)),
                Err(error) => failed.push((ticket, error)),
            }
        }
    }
    assert!(
        matches!(
            failed.as_slice(),
            [("poisoned", OperatorError::NotFinite { sequence_id: 51, position: 3, token: 0, .. })]
        ),
        "{failed:?}"
    );
    let want = |batch: &RecordBatch| write(&teacher, &config, std::slice::from_ref(batch)).remove(0).1;
    made.sort_by_key(|(ticket, _)| *ticket);
    assert_eq!(made, [("first", want(&first)), ("third", want(&third))]);
    // the last token exceeds the teacher's capacity: an error of the teacher fails every batch
    struct Short(Chain);
    impl Teacher for Short {
        fn info(&self) -> &TeacherInfo {
            self.0.info()
        }
        fn slice_rows(&self) -> usize {
            8
        }
        fn buffer(&self) -> stillhouse_teacher::Result<Logits> {
            self.0.buffer()
        }
        fn pass(&self, runs: &Runs) -> stillhouse_teacher::Result<Hidden> {
            self.0.pass(runs)
        }
        fn slice(&self, hidden: &Hidden, tokens: &[u32], logits: &mut Logits) -> stillhouse_teacher::Result<()> {
            self.0.slice(hidden, tokens, logits)
        }
        fn decoding(
            &self,
            slots: usize,
            _: usize,
            layers: &[usize],
        ) -> stillhouse_teacher::Result<Box<dyn Decoding + '_>> {
            self.0.decoding(slots, 4, layers)
        }
    }
    let short = Short(Chain::new());
    let mut decoder = BatchedDecoder::new(&short, config).unwrap();
    for batch in [&first, &third] {
        decoder.push((), batch, Arc::new(Counters::default())).unwrap_or_else(|_| panic!("prompts"));
    }
    let failed = std::iter::repeat_with(|| decoder.step()).find(|ended| !ended.is_empty()).unwrap();
    assert_eq!(failed.len(), 2);
    for ((), written) in failed {
        let error = written.unwrap_err();
        assert!(matches!(error.root(), OperatorError::Teacher(_)), "{error:?}");
        assert!(error.to_string().contains("tokens seen"), "{error}");
    }
    assert!(decoder.is_idle());
    let no_prompts = decoder.push((), &documents(&[(1, "x", true)]), Arc::new(Counters::default()));
    assert!(matches!(no_prompts, Err(((), OperatorError::Arrow { .. }))));
}

#[test]
fn a_teacher_that_cannot_write_says_so() {
    struct Silent(Chain);
    impl Teacher for Silent {
        fn info(&self) -> &TeacherInfo {
            self.0.info()
        }
        fn slice_rows(&self) -> usize {
            8
        }
        fn buffer(&self) -> stillhouse_teacher::Result<Logits> {
            self.0.buffer()
        }
        fn pass(&self, runs: &Runs) -> stillhouse_teacher::Result<Hidden> {
            self.0.pass(runs)
        }
        fn slice(&self, hidden: &Hidden, tokens: &[u32], logits: &mut Logits) -> stillhouse_teacher::Result<()> {
            self.0.slice(hidden, tokens, logits)
        }
    }
    let silent = Silent(Chain::new());
    let refused = BatchedDecoder::<()>::new(&silent, Arc::new(chain_config(json!({}), 24))).err().unwrap().to_string();
    assert!(refused.contains("device of a teacher that writes"), "{refused}");
    let context = context(&gpt2());
    assert!(chain_config(json!({}), 24).operator(&context).is_err(), "no teacher");
}

/// Prompts are the first tokens of each document for any division into pieces. With prompt tokens, empty documents get
/// no row.
#[test]
fn prompts_are_the_first_tokens_of_documents() {
    let context = context(&gpt2());
    let mut of =
        vec![(7, "one two three four five", true), (8, "", true), (9, "six", false), (9, " seven eight", true)];
    of.extend((10..80).map(|id| (id, "x", true)));
    let make = |tokens: usize| {
        let mut batches = vec![documents(&of)];
        batches = drive(&mut TokenizeConfig { piece_bytes: 1000 }.build(&context).unwrap(), &batches).unwrap();
        drive(PromptsConfig { tokens }.operator(&context).unwrap().as_mut(), &batches).unwrap()
    };
    let rows = |batches: &[RecordBatch]| -> Vec<(u64, u64, usize)> {
        let row = |batch: &RecordBatch| {
            let id = |name: &str| batch.column_by_name(name).unwrap().as_primitive::<UInt64Type>().values().to_vec();
            let lists = ListRows::from_batch(batch, "prompt").unwrap();
            let lengths = (0..lists.len()).map(|row| lists.range(row).len());
            let rows = id("sequence_id").into_iter().zip(id("document_id")).zip(lengths);
            rows.map(|((id, document), length)| (id, document, length)).collect::<Vec<_>>()
        };
        batches.iter().flat_map(row).collect()
    };
    let made = make(2);
    assert_eq!(made.iter().map(RecordBatch::num_rows).collect::<Vec<_>>(), [64, 8]);
    let all = rows(&made);
    assert_eq!(all[..3], [(3 << 32, 7, 2), ((3 << 32) + 1, 9, 2), ((3 << 32) + 2, 10, 1)]);
    assert!(all.windows(2).all(|pair| pair[1].0 == pair[0].0 + 1));
    let counted = statistics(&context);
    assert_eq!((counted.empty_documents, counted.dropped_tokens), (1, 4));
    let none = rows(&make(0));
    assert_eq!((none.len(), none[1]), (73, ((3 << 32) + 1, 8, 0)));
    assert!(none.iter().all(|(.., length)| *length == 0));
}

/// The operator for engines that do not own devices returns what the decoder returns.
#[test]
fn the_operator_writes_what_the_writer_writes() {
    let config = chain_config(json!({"prompt_tokens": 3, "slots": 4}), 24);
    let teacher: Arc<dyn Teacher> = Arc::new(Chain::new());
    let context = SplitContext { teacher: Some(Arc::clone(&teacher)), ..context(&gpt2()) };
    let made = drive(config.operator(&context).unwrap().as_mut(), &chain_prompts()).unwrap();
    let mut want = write(teacher.as_ref(), &config, &chain_prompts());
    want.sort_by_key(|(number, _)| *number);
    assert_eq!(made, want.into_iter().map(|(_, batch)| batch).collect::<Vec<_>>());
    assert_eq!(made[0].schema(), config.output_schema(&arrow::datatypes::Schema::empty()));
    let view = config.view(&made[0].slice(2, 1)).unwrap().unwrap();
    assert_eq!(view.facts[0], (GIVEN.to_owned(), "3".to_owned()));
    let written: usize = view.facts[1].1.parse().unwrap();
    let by = |name: &str| view.tokens.iter().filter(|by| *by == name).count();
    let by_teacher = view.tokens.iter().filter(|by| by.starts_with("written · ")).count();
    assert_eq!((by(GIVEN), by_teacher, by("")), (3, written, 24 - 3 - written), "{:?}", view.tokens);
    assert_eq!(view.tokens[..3], [GIVEN; 3]);
}

/// The checks of `generate` find what those of `pack` and `extract` do not.
#[test]
fn rows_that_no_teacher_writes_are_found() {
    let config = chain_config(json!({"prompt_tokens": 3, "slots": 4}), 24);
    let good = write(&Chain::new(), &config, &chain_prompts()[..1]).remove(0).1;
    let limits = CheckContext {
        vocab_size: VOCAB,
        length: 24,
        split: stillhouse_schemas::ids::SplitId(0),
        sequence_range: None,
    };
    let messages = |batch: &RecordBatch, config: &GenerateConfig| {
        let mut violations = Vec::new();
        OperatorConfig::check(config, batch, &limits, &mut violations).unwrap();
        violations.into_iter().map(|b| b.message).collect::<Vec<_>>().join("; ")
    };
    assert_eq!(messages(&good, &config), "");
    let at = good.schema().index_of(GIVEN).unwrap();
    let given = |n: i32| {
        let mut arrays = good.columns().to_vec();
        arrays[at] = Arc::new(Int32Array::from(vec![n; good.num_rows()]));
        RecordBatch::try_new(good.schema(), arrays).unwrap()
    };
    assert!(messages(&given(0), &config).contains("given is 0"));
    assert!(messages(&given(24), &config).contains("given is 24"));
    // written positions declared as given are not certain
    assert!(messages(&given(5), &config).contains("logprob of a position that is given or padding"));
    let other_bos = GenerateConfig { pack: PackConfig { bos: Some(3), ..config.pack.clone() }, ..config.clone() };
    assert!(messages(&good, &other_bos).contains("the row begins with"));
    let other_eos = GenerateConfig { eos: 4, ..config.clone() };
    assert!(messages(&good, &other_eos).contains("valid: up to its first eos"));
    let endless =
        GenerateConfig { sequential: Sequential { stop: Stop::Length, ..config.sequential.clone() }, ..config.clone() };
    assert!(messages(&good, &endless).contains("as it does not stop at eos"));
}
