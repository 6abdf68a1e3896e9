//! Tests that the signals and hidden states of generated text equal those of a pass over it, for any sampling and any
//! other texts.

use arrow::array::Float32Array;
use stillhouse_noise::{LoadedRow, RowSignals};
use stillhouse_signals::{certain, requested};

use super::*;
use crate::extract::{StoredSignals, StoredStates};
use crate::rows::list_column;

fn all_signals(precision: &str) -> serde_json::Value {
    json!({
        "logz_temperatures": [1.0, 0.5], "entropy": true, "candidates": [7, 3], "samples": {"draws": 25, "power": 0.8},
        "top_p": {"mass": 0.8, "most": 9}, "hidden_states": {"layers": [1, 0], "precision": precision}
    })
}

fn chain_asking(written: serde_json::Value) -> GenerateConfig {
    asking(all_signals("f32"), written, VOCAB, [BOS, EOS], 24)
}

/// Returns the stored signals and states of each row and position.
fn stored(config: &GenerateConfig, made: &RecordBatch) -> Vec<Vec<(RowSignals, Vec<f32>)>> {
    let (signals, misfits) = StoredSignals::of(&config.extract.signals, made).unwrap();
    assert_eq!(misfits, []);
    let states = StoredStates::of(config.extract.hidden.as_ref(), made).unwrap().unwrap();
    let at = |row, position| (signals.at(row, position), states.at(row, position).to_vec());
    let of_row = |row| (0..config.length()).map(|position| at(row, position)).collect();
    (0..made.num_rows()).map(of_row).collect()
}

fn given(made: &RecordBatch) -> Vec<usize> {
    let given = made.column_by_name(GIVEN).unwrap().as_primitive::<Int32Type>();
    given.values().iter().map(|n| *n as usize).collect()
}

#[test]
fn signals_are_of_the_distribution_before_anything_is_cut_away() {
    let teacher = Chain::new();
    let (mut softmax, mut wide, mut early) = (Softmax::new(VOCAB).unwrap(), 0, 0);
    for written in [
        json!({"prompt_tokens": 3}),
        json!({"prompt_tokens": 3, "temperature": 0.5, "top_k": 2, "top_p": 0.9}),
        json!({"prompt_tokens": 3, "temperature": 0}),
    ] {
        let config = chain_asking(written);
        let asked = requested(&config.extract.signals);
        let mut columns = config.extract.signals.iter().flat_map(|signal| signal.columns());
        let entropy = columns.position(|column| column.name == columns::ENTROPY).unwrap();
        for (_, made) in write(&teacher, &config, &chain_prompts()) {
            let (stored, given) = (stored(&config, &made), given(&made));
            for (row, sequence) in sequences(&made).unwrap().iter().enumerate() {
                early += usize::from(sequence.valid < 24);
                for (position, token) in sequence.tokens.iter().enumerate() {
                    let want = if (given[row]..sequence.valid).contains(&position) {
                        let before = sequence.tokens[position - 1];
                        let logits = chain_logits(before);
                        softmax.load(&logits).unwrap();
                        let signals = asked.compute(&LoadedRow::new(&softmax, &logits, sequence.id, position as u32));
                        wide += usize::from(config.sequential.top_k == 2 && signals[entropy].f32s()[0] > 2f32.ln());
                        (signals, chain_states(&[1, 0], before, position))
                    } else {
                        (certain(&config.extract.signals, *token), vec![0.0; 2 * WIDTH])
                    };
                    assert_eq!(stored[row][position], want, "row {row} position {position}");
                }
            }
        }
    }
    assert!(early > 10, "texts that end early");
    assert!(wide > 100, "two entries have no such entropy");
}

/// Computes the columns of a parallel job over the written rows, with the operator `extract`.
fn extract_in_parallel(teacher: &Arc<dyn Teacher>, config: &GenerateConfig, made: &RecordBatch) -> RecordBatch {
    let packed = made.project(&(0..made.schema().index_of(GIVEN).unwrap()).collect::<Vec<_>>()).unwrap();
    let context = SplitContext { teacher: Some(Arc::clone(teacher)), ..context(&gpt2()) };
    drive(&mut config.extract.build(&context).unwrap(), &[packed]).unwrap().remove(0)
}

#[test]
fn a_parallel_job_over_the_written_rows_has_the_same_columns_to_the_bit() {
    let teacher: Arc<dyn Teacher> = nano().into();
    let prompts = [
        prompts(&[(1, vec![464, 3290]), (2, vec![]), (3, vec![40])]),
        prompts(&[(7, vec![1212, 318, 257]), (8, vec![50_256]), (9, vec![13; 11])]),
    ];
    for (written, precision) in
        [(json!({}), "f16"), (json!({"temperature": 0.7, "top_k": 40, "top_p": 0.9, "stop": "length"}), "f32")]
    {
        let mut batches = Vec::new();
        for slots in [1, 4] {
            let mut written = written.clone();
            written["slots"] = slots.into();
            let mut config = asking(all_signals(precision), written, 50_257, [50_256; 2], 20);
            config.extract.hidden.as_mut().unwrap().layers = vec![4, 0, 2];
            let mut made = write(teacher.as_ref(), &config, &prompts);
            made.sort_by_key(|(number, _)| *number);
            for (_, made) in &made {
                let (here, there) = (stored(&config, made), extract_in_parallel(&teacher, &config, made));
                let (other, given) = (stored(&config, &there), given(made));
                for (row, sequence) in sequences(made).unwrap().iter().enumerate() {
                    for (position, token) in sequence.tokens.iter().enumerate() {
                        let (here, other) = (&here[row][position], &other[row][position]);
                        if (1..given[row]).contains(&position) {
                            // the parallel job predicts the prompt, too
                            assert!(
                                here.0 == certain(&config.extract.signals, *token) && here != other,
                                "row {row} position {position}"
                            );
                            continue;
                        }
                        assert_eq!(here, other, "row {row} position {position}");
                        assert_eq!(here.1.iter().all(|v| *v == 0.0), position == 0 || position >= sequence.valid);
                    }
                }
            }
            batches.push(made);
        }
        assert_eq!(batches[0], batches[1], "slots");
    }
}

#[test]
fn signals_do_not_know_of_other_texts_nor_of_slots() {
    let teacher = Chain::new();
    let of_slots = |slots: u32| chain_asking(json!({"prompt_tokens": 3, "slots": slots}));
    let alone = |batch: &RecordBatch| write(&teacher, &of_slots(1), std::slice::from_ref(batch)).remove(0).1;
    let alone: Vec<RecordBatch> = chain_prompts().iter().map(alone).collect();
    for slots in [2, 5, 16, 100] {
        let config = of_slots(slots);
        for (number, batch) in write(&teacher, &config, &chain_prompts()) {
            assert_eq!(batch, alone[number], "{slots} slots");
            assert_eq!(messages(&batch, &config), "");
        }
    }
    // the path of engines that do not own devices
    let teacher: Arc<dyn Teacher> = Arc::new(Chain::new());
    let context = SplitContext { teacher: Some(teacher), ..context(&gpt2()) };
    let made = drive(of_slots(4).operator(&context).unwrap().as_mut(), &chain_prompts()).unwrap();
    assert_eq!(made, alone);
    assert_eq!(made[0].schema(), of_slots(4).output_schema(&arrow::datatypes::Schema::empty()));
}

#[test]
fn states_that_do_not_fit_fail_their_batch_and_no_other() {
    let teacher = Chain::new();
    let config = asking(all_signals("f16"), json!({"prompt_tokens": 3, "slots": 3}), VOCAB, [BOS, EOS], 24);
    let mut decoder = BatchedDecoder::new(&teacher, Arc::new(config.clone())).unwrap();
    let (sound, wide) = (prompts(&[(1, vec![4]), (2, vec![5, 6])]), prompts(&[(50, vec![1]), (51, vec![2, WIDE])]));
    for (ticket, batch) in [("first", &sound), ("wide", &wide), ("again", &sound)] {
        decoder.push(ticket, batch, Arc::new(Counters::default())).unwrap_or_else(|_| panic!("prompts"));
    }
    let (mut made, mut failed) = (Vec::new(), Vec::new());
    while !decoder.is_idle() {
        for (ticket, written) in decoder.step() {
            match written {
                Ok(written) => made.push(written.batch),
                Err(error) => failed.push((ticket, error.to_string())),
            }
        }
    }
    let [("wide", error)] = failed.as_slice() else { panic!("{failed:?}") };
    for part in ["sequence 51, position 3", "component 0 of the hidden state of layer 1 is 70000", "precision: f32"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert_eq!(made, vec![write(&teacher, &config, &[sound]).remove(0).1; 2]);
}

fn messages(batch: &RecordBatch, config: &GenerateConfig) -> String {
    let split = stillhouse_schemas::ids::SplitId(0);
    let limits = CheckContext { vocab_size: VOCAB, length: 24, split, sequence_range: None };
    let mut violations = Vec::new();
    OperatorConfig::check(config, batch, &limits, &mut violations).unwrap();
    violations.into_iter().map(|b| b.message).collect::<Vec<_>>().join("; ")
}

#[test]
fn what_is_given_has_no_signals_of_its_own() {
    let config = chain_asking(json!({"prompt_tokens": 3}));
    let good = write(&Chain::new(), &config, &chain_prompts()[..1]).remove(0).1;
    let with = |name: &str, value: f32| {
        let (schema, mut arrays) = (good.schema(), good.columns().to_vec());
        let (at, field) = schema.column_with_name(name).unwrap();
        let lists = ListRows::from_batch(&good, name).unwrap();
        let lengths: Vec<usize> = (0..lists.len()).map(|row| lists.range(row).len()).collect();
        let values = Arc::new(Float32Array::from(vec![value; lengths.iter().sum()]));
        arrays[at] = list_column(field, values, &lengths).unwrap();
        RecordBatch::try_new(good.schema(), arrays).unwrap()
    };
    for name in [columns::ENTROPY, columns::HIDDEN_STATES, columns::LOGZ] {
        let said = messages(&with(name, 0.5), &config);
        assert!(said.contains("position 0 is given or padding, but its signals or hidden states"), "{name}: {said}");
    }
    let view = OperatorConfig::view(&config, &good.slice(2, 1)).unwrap().unwrap();
    let facts: Vec<&str> = view.facts.iter().map(|(what, _)| what.as_str()).collect();
    for fact in [GIVEN, "written", "mean entropy", "hidden states"] {
        assert!(facts.contains(&fact), "{fact}: {facts:?}");
    }
    assert_eq!(view.tokens[0], GIVEN);
    assert!(view.tokens[3].starts_with("written · ") && view.tokens[3].contains("|h1| "), "{:?}", view.tokens);
}

#[test]
fn what_is_held_of_texts_is_bounded() {
    let bounds = |config: &GenerateConfig| (config.max_rows_per_part(), config.max_batches_in_flight());
    let slots = json!({"slots": 16});
    assert_eq!(bounds(&config(slots.clone(), VOCAB, [BOS, EOS], 1024)), (64, 2), "as ever without signals");
    assert_eq!(bounds(&config(json!({"slots": 200}), VOCAB, [BOS, EOS], 1024)), (64, 5));
    let mut large = asking(json!({"hidden_states": {"layers": [1, 0]}}), slots, VOCAB, [BOS, EOS], 1024);
    large.extract.hidden.as_mut().unwrap().width = 4096;
    // 64 MB over 1,024 · (2 bytes · 2 layers · 4,096, and the top-k)
    assert_eq!(bounds(&large), (3, 7));
    large.extract.hidden.as_mut().unwrap().width = 1 << 20;
    assert_eq!(bounds(&large), (1, 17), "a slot has its text whatever that takes");
    let many = json!({"top_p": {"mass": 0.9, "most": 4000}});
    let many = asking(many, json!({}), 50_257, [50_256; 2], 1024).max_rows_per_part();
    assert!((1..4).contains(&many), "{many}");
}
