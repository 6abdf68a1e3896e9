//! Incremental decoding: the logits of every position and the states of every layer equal those of a pass over the
//! whole sequence.

use stillhouse_teacher::{
    Decoding, LoadOptions, Logits, Runs, StepOutput, Teacher, TeacherError, decoding_bytes, load,
};

use super::golden::{Golden, Spelling, cases};
use super::*;

/// A sequence longer than `max_position_embeddings`, and one at whose length LongRoPE changes the rotation.
const NOT_DECODABLE: [&str; 2] = ["llama_dynamic_long", "phi3_longrope_long"];

fn options(dtype: Precision) -> LoadOptions {
    LoadOptions { device: DeviceChoice::Cpu, dtype, ..LoadOptions::default() }
}

/// All layers of a teacher, in descending order.
fn layers(teacher: &dyn Teacher) -> Vec<usize> {
    (0..=teacher.info().layers).rev().collect()
}

/// Returns the logits `[L, V]` and states `[L, layers, H]` of one run from a single pass.
fn parallel(teacher: &dyn Teacher, tokens: &[u32]) -> (Vec<f32>, Vec<f32>) {
    let mut runs = Runs::new();
    runs.push(tokens.iter().copied());
    let (hidden, states) = teacher.pass_with_states(&runs, &layers(teacher)).unwrap();
    let (mut all, mut logits) = (Vec::new(), teacher.buffer().unwrap());
    for rows in (0..tokens.len() as u32).collect::<Vec<_>>().chunks(teacher.slice_rows()) {
        teacher.slice(&hidden, rows, &mut logits).unwrap();
        let Logits::Host(logits) = &logits else { panic!("on a CPU") };
        all.extend_from_slice(logits);
    }
    (all, states)
}

/// Returns the row of token `token` in a matrix of `tokens` rows.
fn row(all: &[f32], tokens: usize, token: usize) -> &[f32] {
    all.chunks_exact(all.len() / tokens).nth(token).unwrap()
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// Logits and states of a pass over a whole text.
type Passed = (Vec<f32>, Vec<f32>);

/// Feeds a slot tokens in pieces of these lengths, repeated, and checks that each step returns what the pass returned.
fn check_decoding(
    decoding: &mut dyn Decoding,
    slot: usize,
    tokens: &[u32],
    pieces: &[usize],
    want: &Passed,
    what: &str,
) {
    let (mut done, mut out) = (0, StepOutput::default());
    for n in pieces.iter().cycle() {
        let next = &tokens[done..tokens.len().min(done + n)];
        decoding.step(&[(slot, next)], &mut out).unwrap();
        done += next.len();
        assert!(same_bits(&out.logits, row(&want.0, tokens.len(), done - 1)), "{what}: logits after {done} tokens");
        assert!(same_bits(&out.states, row(&want.1, tokens.len(), done - 1)), "{what}: states after {done} tokens");
        if done == tokens.len() {
            return;
        }
    }
}

#[test]
fn every_family_goes_on_as_it_began_to_the_bit() {
    for case in cases() {
        let golden = Golden::read(&case);
        let folder = golden.checkpoint(Spelling::Now, 1);
        let teacher = load(folder.path(), &options(Precision::F32)).unwrap();
        let made = teacher.decoding(3, golden.length, &layers(teacher.as_ref()));
        if NOT_DECODABLE.contains(&case.as_str()) {
            assert!(matches!(made, Err(TeacherError::Input { .. })), "{case}");
            continue;
        }
        let mut decoding = made.unwrap();
        for (slot, tokens) in [2, 0].into_iter().zip(golden.tokens.chunks(golden.length)) {
            let want = parallel(teacher.as_ref(), tokens);
            for pieces in [&[1][..], &[golden.length], &[3, 1, 1, 7]] {
                decoding.clear(slot);
                check_decoding(decoding.as_mut(), slot, tokens, pieces, &want, &format!("{case} {pieces:?}"));
            }
        }
    }
}

#[test]
fn slots_do_not_know_of_each_other_nor_of_threads() {
    for (model, dtype) in MODELS.into_iter().zip([Precision::F32, Precision::Bf16, Precision::F16]) {
        let teacher = load(&testdata(model), &options(dtype)).unwrap();
        let (vocab, length) = (teacher.info().vocab_size, 150.min(teacher.info().max_positions));
        let of_a_text = layers(teacher.as_ref()).len() * teacher.info().hidden_size;
        let text = |seed: usize| -> Vec<u32> { (0..length).map(|i| ((i * 31 + seed * 17) % vocab) as u32).collect() };
        let texts: Vec<Vec<u32>> = (0..5).map(text).collect();
        let want: Vec<Passed> = texts.iter().map(|text| parallel(teacher.as_ref(), text)).collect();
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                // Five texts with prompts of different lengths share two slots; each starts in a slot that another has
                // finished.
                let mut decoding = teacher.decoding(2, length, &layers(teacher.as_ref())).unwrap();
                let (mut waiting, mut at) = (0..texts.len(), [None::<(usize, usize)>; 2]);
                let mut out = StepOutput::default();
                loop {
                    for (slot, state) in at.iter_mut().enumerate() {
                        if state.is_none_or(|(_, done)| done == length) {
                            decoding.clear(slot);
                            *state = waiting.next().map(|text| (text, 0));
                        }
                    }
                    let mut inputs = Vec::new();
                    for (slot, state) in at.iter_mut().enumerate() {
                        let Some((text, done)) = state else { continue };
                        let n = if *done == 0 { 7 * *text + 1 } else { 1 }.min(length - *done);
                        inputs.push((slot, &texts[*text][*done..*done + n]));
                        *done += n;
                    }
                    if inputs.is_empty() {
                        break;
                    }
                    decoding.step(&inputs, &mut out).unwrap();
                    let got = out.logits.chunks_exact(vocab).zip(out.states.chunks_exact(of_a_text));
                    assert_eq!(got.len(), inputs.len());
                    for ((slot, _), (logits, states)) in inputs.iter().zip(got) {
                        let (text, done) = at[*slot].unwrap();
                        assert!(logits == row(&want[text].0, length, done - 1), "{model}: text {text}, {done}");
                        assert!(states == row(&want[text].1, length, done - 1), "{model}: states of {text}, {done}");
                    }
                }
            });
        }
    }
}

/// Several prompts with more tokens than pass through the net at once, in one step.
#[test]
fn many_prompts_at_once_are_those_of_one_by_one() {
    let teacher = load(&testdata("gpt2"), &options(Precision::F32)).unwrap();
    let (vocab, length) = (teacher.info().vocab_size, teacher.info().max_positions.min(100));
    let slots = 2500 / length;
    let layers = layers(teacher.as_ref());
    let text = |slot: usize| -> Vec<u32> { (0..length - slot % 3).map(|i| ((i * 7 + slot) % vocab) as u32).collect() };
    let texts: Vec<Vec<u32>> = (0..slots).map(text).collect();
    let inputs: Vec<(usize, &[u32])> = texts.iter().map(Vec::as_slice).enumerate().collect();
    let mut together = StepOutput::default();
    teacher.decoding(slots, length, &layers).unwrap().step(&inputs, &mut together).unwrap();
    let mut alone = teacher.decoding(1, length, &layers).unwrap();
    for (slot, text) in inputs {
        let mut one = StepOutput::default();
        alone.clear(0);
        alone.step(&[(0, text)], &mut one).unwrap();
        assert!(same_bits(&one.logits, row(&together.logits, slots, slot)), "logits of slot {slot}");
        assert!(same_bits(&one.states, row(&together.states, slots, slot)), "states of slot {slot}");
    }
}

#[test]
fn what_makes_no_step_is_refused() {
    let teacher = load(&testdata("gpt2"), &options(Precision::F32)).unwrap();
    let most = teacher.info().max_positions;
    for (slots, length) in [(0, 4), (1, 0), (1, most + 1)] {
        assert!(matches!(teacher.decoding(slots, length, &[]), Err(TeacherError::Input { .. })), "{slots} x {length}");
    }
    let beyond = teacher.decoding(1, 4, &[0, teacher.info().layers + 1]).err().unwrap().to_string();
    assert!(beyond.contains("layer of hidden states"), "{beyond}");
    let mut decoding = teacher.decoding(2, 4, &[0]).unwrap();
    let mut out = StepOutput::default();
    let vocab = teacher.info().vocab_size as u32;
    for inputs in [
        &[(1, &[1u32][..]), (0, &[1])][..],
        &[(0, &[1]), (0, &[1])],
        &[(2, &[1])],
        &[(0, &[])],
        &[(0, &[1; 5])],
        &[(0, &[vocab])],
    ] {
        assert!(matches!(decoding.step(inputs, &mut out), Err(TeacherError::Input { .. })), "{inputs:?}");
    }
    decoding.step(&[(1, &[1; 4])], &mut out).unwrap();
    assert_eq!(out.states.len(), teacher.info().hidden_size);
    assert!(decoding.step(&[(1, &[1])], &mut out).is_err(), "full");
    decoding.step(&[], &mut out).unwrap();
    assert!(out.logits.is_empty() && out.states.is_empty());
}

#[test]
fn the_memory_of_slots_is_what_is_said() {
    for model in MODELS {
        let teacher = load(&testdata(model), &options(Precision::F32)).unwrap();
        let length = 100.min(teacher.info().max_positions);
        let estimated = decoding_bytes(&testdata(model), length, &[]).unwrap() * 3;
        let taken = teacher.decoding(3, length, &[]).unwrap().bytes() as u64;
        assert!(taken <= estimated && estimated <= 2 * taken + (1 << 20), "{model}: {taken} of {estimated}");
    }
}
