//! Sequences that go on: the logits of every position are those of the pass over the whole of it.

use stillhouse_teacher::{Decoding, LoadOptions, Logits, Runs, Teacher, TeacherError, decoding_bytes, load};

use super::golden::{Golden, Spelling, cases};
use super::*;

/// A sequence beyond `max_position_embeddings`, and one that LongRoPE rotates otherwise than what it began with.
const REFUSED: [&str; 2] = ["llama_dynamic_long", "phi3_longrope_long"];

fn options(dtype: Precision) -> LoadOptions {
    LoadOptions { device: DeviceChoice::Cpu, dtype, ..LoadOptions::default() }
}

/// Logits `[L, V]` of one run, in a single pass.
fn parallel(teacher: &dyn Teacher, tokens: &[u32]) -> Vec<f32> {
    let mut runs = Runs::new();
    runs.push(tokens.iter().copied());
    let hidden = teacher.pass(&runs).unwrap();
    let (mut all, mut logits) = (Vec::new(), teacher.buffer().unwrap());
    for rows in (0..tokens.len() as u32).collect::<Vec<_>>().chunks(teacher.slice_rows()) {
        teacher.slice(&hidden, rows, &mut logits).unwrap();
        let Logits::Host(logits) = &logits else { panic!("on a CPU") };
        all.extend_from_slice(logits);
    }
    all
}

/// Shows a slot tokens in pieces of these lengths, again and again; the logits after each piece must be those of the pass.
fn goes_on(decoding: &mut dyn Decoding, slot: usize, tokens: &[u32], pieces: &[usize], want: &[f32], what: &str) {
    let (vocab, mut done, mut logits) = (want.len() / tokens.len(), 0, Vec::new());
    for n in pieces.iter().cycle() {
        let next = &tokens[done..tokens.len().min(done + n)];
        decoding.step(&[(slot, next)], &mut logits).unwrap();
        done += next.len();
        let same = logits.iter().zip(&want[(done - 1) * vocab..]).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same && logits.len() == vocab, "{what}: after {done} tokens");
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
        let made = teacher.decoding(3, golden.length);
        if REFUSED.contains(&case.as_str()) {
            assert!(matches!(made, Err(TeacherError::Input { .. })), "{case}");
            continue;
        }
        let mut decoding = made.unwrap();
        for (slot, tokens) in [2, 0].into_iter().zip(golden.tokens.chunks(golden.length)) {
            let want = parallel(teacher.as_ref(), tokens);
            for pieces in [&[1][..], &[golden.length], &[3, 1, 1, 7]] {
                decoding.clear(slot);
                goes_on(decoding.as_mut(), slot, tokens, pieces, &want, &format!("{case} {pieces:?}"));
            }
        }
    }
}

#[test]
fn slots_do_not_know_of_each_other_nor_of_threads() {
    for (model, dtype) in MODELS.into_iter().zip([Precision::F32, Precision::Bf16, Precision::F16]) {
        let teacher = load(&testdata(model), &options(dtype)).unwrap();
        let (vocab, length) = (teacher.info().vocab_size, 150.min(teacher.info().max_positions));
        let text = |seed: usize| -> Vec<u32> { (0..length).map(|i| ((i * 31 + seed * 17) % vocab) as u32).collect() };
        let texts: Vec<Vec<u32>> = (0..5).map(text).collect();
        let want: Vec<Vec<f32>> = texts.iter().map(|text| parallel(teacher.as_ref(), text)).collect();
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                // five texts through two slots, each beginning where one has ended, prompts of other lengths
                let mut decoding = teacher.decoding(2, length).unwrap();
                let (mut waiting, mut at, mut logits) = (0..texts.len(), [None::<(usize, usize)>; 2], Vec::new());
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
                    decoding.step(&inputs, &mut logits).unwrap();
                    for ((slot, _), got) in inputs.iter().zip(logits.chunks_exact(vocab)) {
                        let (text, done) = at[*slot].unwrap();
                        assert!(got == &want[text][(done - 1) * vocab..done * vocab], "{model}: text {text}, {done}");
                    }
                }
            });
        }
    }
}

#[test]
fn what_makes_no_step_is_refused() {
    let teacher = load(&testdata("gpt2"), &options(Precision::F32)).unwrap();
    let most = teacher.info().max_positions;
    for (slots, length) in [(0, 4), (1, 0), (1, most + 1)] {
        assert!(matches!(teacher.decoding(slots, length), Err(TeacherError::Input { .. })), "{slots} x {length}");
    }
    let mut decoding = teacher.decoding(2, 4).unwrap();
    let mut logits = Vec::new();
    let vocab = teacher.info().vocab_size as u32;
    for inputs in [
        &[(1, &[1u32][..]), (0, &[1])][..],
        &[(0, &[1]), (0, &[1])],
        &[(2, &[1])],
        &[(0, &[])],
        &[(0, &[1; 5])],
        &[(0, &[vocab])],
    ] {
        assert!(matches!(decoding.step(inputs, &mut logits), Err(TeacherError::Input { .. })), "{inputs:?}");
    }
    decoding.step(&[(1, &[1; 4])], &mut logits).unwrap();
    assert!(decoding.step(&[(1, &[1])], &mut logits).is_err(), "full");
    decoding.step(&[], &mut logits).unwrap();
    assert!(logits.is_empty());
}

#[test]
fn the_memory_of_slots_is_what_is_said() {
    for model in MODELS {
        let teacher = load(&testdata(model), &options(Precision::F32)).unwrap();
        let length = 100.min(teacher.info().max_positions);
        let said = decoding_bytes(&testdata(model), length, &[]).unwrap() * 3;
        let taken = teacher.decoding(3, length).unwrap().bytes() as u64;
        assert!(taken <= said && said <= 2 * taken + (1 << 20), "{model}: {taken} of {said}");
    }
}
