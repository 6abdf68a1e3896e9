//! Teachers on a device with too little memory, emulated by the host: passes are smaller, or the error states the
//! required and free bytes.

use std::sync::Arc;

use stillhouse_gpu_host::Host;
use stillhouse_noise::{DrawKey, ExtractionSpec, NoiseForm, Signals, Tolerance, ValueType};
use stillhouse_signals::TopK;
use stillhouse_teacher::stillhouse_gpu::Device;
use stillhouse_teacher::stillhouse_gpu::extract::{ExtractRequest, Extractor};
use stillhouse_teacher::{LoadOptions, Logits, Runs, Teacher, gpu};

use super::*;

const LENGTH: usize = 32;
/// More bytes than any of these tests needs.
const MUCH: u64 = 4 << 30;

fn extraction(noise: NoiseForm, draws: u32) -> ExtractionSpec {
    let vocab = stillhouse_teacher::TeacherConfig::read(&testdata("llama-gqa")).unwrap().vocab_size;
    ExtractionSpec {
        vocab,
        keys: DrawKey::draws(1, draws),
        noise: Some(noise),
        signals: Signals::new(vec![Arc::new(TopK { k: 2 })]),
    }
}

fn replay(draws: u32) -> ExtractionSpec {
    let tolerance = Tolerance::new(1e-3).unwrap();
    extraction(NoiseForm::Replay { tolerance, value_type: ValueType::F16, condition: true }, draws)
}

fn options(batch_tokens: usize, extraction: &ExtractionSpec) -> LoadOptions {
    let extraction = Some(extraction.clone());
    LoadOptions { dtype: Precision::Bf16, batch_tokens, length: LENGTH, extraction, ..LoadOptions::default() }
}

fn load(host: Host, options: &LoadOptions) -> Result<(Arc<Host>, Box<dyn Teacher>), String> {
    let host = Arc::new(host);
    let device: Arc<dyn Device> = host.clone();
    let teacher = gpu::load(&testdata("llama-gqa"), &device, options).map_err(|e| e.to_string())?;
    Ok((host, teacher))
}

/// Returns the peak memory with passes of `options.batch_tokens` tokens.
fn needed(options: &LoadOptions) -> u64 {
    let (host, teacher) = load(Host::with_memory(0, MUCH), options).unwrap();
    assert_eq!(teacher.pass_tokens(), options.batch_tokens);
    host.peak_used()
}

/// Loads on a device that reports `MUCH` free bytes, of which only `usable` can be allocated.
fn with_usable(usable: u64, options: &LoadOptions) -> Result<(Arc<Host>, Box<dyn Teacher>), String> {
    load(Host::fragmented(0, MUCH, MUCH - usable), options)
}

/// Does the first steps of a job and returns the logits.
fn work(host: &Arc<Host>, teacher: &dyn Teacher, extraction: &ExtractionSpec) -> Vec<f32> {
    let device: Arc<dyn Device> = host.clone();
    let mut buffers = [teacher.buffer().unwrap(), teacher.buffer().unwrap()];
    let request = ExtractRequest::with_stride(extraction, extraction.vocab.next_multiple_of(8));
    let _extractor = Extractor::new(&device, request, teacher.slice_rows()).unwrap();
    let mut runs = Runs::new();
    for run in 0..teacher.pass_tokens().min(4 * LENGTH) / LENGTH {
        runs.push((0..LENGTH as u32).map(|i| (i * 7 + run as u32) % extraction.vocab as u32));
    }
    let hidden = teacher.pass(&runs).unwrap();
    teacher.slice(&hidden, &[3, 17], &mut buffers[0]).unwrap();
    let Logits::Device(_) = &buffers[0] else { panic!("not on the device") };
    buffers[0].on_host().unwrap().into_owned()
}

#[test]
fn memory_that_is_not_there_makes_passes_half_as_long_once() {
    let extraction = replay(1);
    // With 32,768 tokens, the buffers of passes are the largest part and are allocated first. The extraction's buffers
    // are allocated last.
    for tokens in [32_768, 512] {
        let [whole, half, quarter] =
            [tokens, tokens / 2, tokens / 4].map(|tokens| needed(&options(tokens, &extraction)));
        let (_, teacher) = with_usable(whole + 65_536, &options(tokens, &extraction)).unwrap();
        assert_eq!((teacher.pass_tokens(), teacher.warning()), (tokens, None));
        assert!(!teacher.info().arithmetic.contains("passes of"));
        for usable in [whole - 1024, (whole + half) / 2, half + 65_536] {
            let (host, teacher) = with_usable(usable, &options(tokens, &extraction)).unwrap();
            assert_eq!(teacher.pass_tokens(), tokens / 2, "{usable} of {whole}");
            let warning = teacher.warning().unwrap();
            println!("{usable} of {whole}: {warning}");
            let suffix = format!(", with passes of {tokens} tokens; they have {} tokens instead", tokens / 2);
            assert!(warning.starts_with("host: out of memory: ") && warning.ends_with(&suffix), "{warning}");
            let arithmetic = &teacher.info().arithmetic;
            assert!(arithmetic.ends_with(&format!("passes of {} tokens", tokens / 2)), "{arithmetic}");
            work(&host, teacher.as_ref(), &extraction);
        }
        // Passes are halved only once: less memory than for a half is an error, even if a quarter would fit.
        for usable in [half - 1024, quarter + 65_536] {
            let error = with_usable(usable, &options(tokens, &extraction)).err().unwrap();
            let parts = format!("a pass over {} tokens", tokens / 2);
            assert!(error.contains("out of memory: ") && error.contains(" are free: weights "), "{error}");
            assert!(error.contains(&parts) && error.contains("valid: a smaller type"), "{error}");
        }
    }
}

/// Passes that were reduced for lack of memory give the same bits as passes of that size by choice.
#[test]
fn passes_of_an_earlier_run_are_kept_to() {
    let extraction = replay(1);
    let of = |pass_tokens| LoadOptions { pass_tokens, ..options(512, &extraction) };
    let [whole, half] = [512, 256].map(|tokens| needed(&options(tokens, &extraction)));
    let (host, short) = with_usable((whole + half) / 2, &of(None)).unwrap();
    let (other, resumed) = load(Host::with_memory(0, MUCH), &of(Some(256))).unwrap();
    assert_eq!((short.pass_tokens(), resumed.pass_tokens(), resumed.warning()), (256, 256, None));
    assert_eq!(short.info().arithmetic, resumed.info().arithmetic);
    assert_eq!(work(&host, short.as_ref(), &extraction), work(&other, resumed.as_ref(), &extraction));

    // The passes do not fit, by what the device reports as free or by what it can allocate.
    let error = load(Host::with_memory(0, half - 1024), &of(Some(256))).err().unwrap();
    let (bytes, free) = (format!("{half} bytes requested"), format!("{0} of {0} are free", half - 1024));
    assert!(error.contains(&bytes) && error.contains(&free) && error.contains("--overwrite"), "{error}");
    let error = with_usable(half - 1024, &of(Some(256))).err().unwrap();
    assert!(error.contains("out of memory") && error.contains("--overwrite"), "{error}");
}

/// Draws and dense noise need memory of their own, which the size of a pass takes into account.
#[test]
fn draws_and_dense_noise_count() {
    let dense = |draws| extraction(NoiseForm::Dense { value_type: ValueType::F32, condition: true }, draws);
    for (few, many) in [(replay(1), replay(3)), (dense(1), dense(16))] {
        // Includes the spare share.
        let total = needed(&options(64, &few)) * 110 / 100;
        let (_, teacher) = load(Host::with_memory(0, total), &options(64, &few)).unwrap();
        assert_eq!((teacher.pass_tokens(), teacher.warning()), (64, None));
        let error = load(Host::with_memory(0, total), &options(64, &many)).err().unwrap();
        assert!(
            error.contains(&format!("{total} of {total} are free")) && error.contains("logits and noise"),
            "{error}"
        );
    }
}
