//! The bits of the random words and exponentials, and the reference values of the format.

use std::sync::Arc;

use serde_json::Value;
use stillhouse_gpu::extract::{Dense, ExtractRequest, Noise};
use stillhouse_gpu::{Arg, Buffer, Device, Launch, Stream};
use stillhouse_gpu_host::Host;
use stillhouse_noise::{DrawKey, NoiseStream, Tolerance, ValueType, exponentials};

use crate::extraction::{Slice, on_device};

/// The exponentials e, the separate exponential e_0, and the random words, from the kernel.
fn on_kernel(device: &Arc<dyn Device>, stream: &NoiseStream, vocab: usize) -> (Vec<f32>, f32, Vec<u32>) {
    let (e, words) = (Buffer::new(device, vocab * 4 + 4).unwrap(), Buffer::new(device, vocab * 4).unwrap());
    let [key0, key1] = stream.key.words();
    let args = [
        Arg::U32(key0),
        Arg::U32(key1),
        Arg::U32(stream.position),
        Arg::U64(stream.sequence_id),
        Arg::U32(vocab as u32),
        Arg::Pointer(e.pointer()),
        Arg::Pointer(words.pointer()),
    ];
    let launch = Launch { kernel: "noise_exponentials", grid: [4, 1, 1], block: [256, 1, 1], shared_bytes: 0 };
    // SAFETY: the arguments are the kernel's; the buffers hold this many values
    unsafe { device.launch(Stream::Extract, &launch, &args) }.unwrap();
    let read = |buffer: &Buffer| -> Vec<u32> {
        let bytes = buffer.to_host(Stream::Extract).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|b| u32::from_ne_bytes(*b)).collect()
    };
    let mut e: Vec<f32> = read(&e).into_iter().map(f32::from_bits).collect();
    let e0 = e.pop().unwrap();
    (e, e0, read(&words))
}

#[test]
fn words_and_exponentials_have_the_bits_of_the_cpu() {
    let device: Arc<dyn Device> = Arc::new(Host::new(0));
    let mut expected = vec![0f32; 50_257];
    for (seed, draw, sequence_id, position) in [(0, 0, 0, 0), (u64::MAX, 3, u64::MAX, u32::MAX), (42, 1, 7 << 40, 1023)]
    {
        let stream = NoiseStream::new(DrawKey::new(seed, draw), sequence_id, position);
        let e0 = exponentials(&stream, &mut expected);
        let (e, own_e0, words) = on_kernel(&device, &stream, expected.len());
        assert_eq!(own_e0.to_bits(), e0.to_bits());
        assert!(e.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()));
        assert!(words.iter().enumerate().all(|(k, word)| *word == stream.word(k as u32)));
    }
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().map(|all| all.iter().filter_map(Value::as_f64).collect()).unwrap_or_default()
}

/// ln p_x, e and ξ are the reference values, for rows whose logits are in the file.
#[test]
fn the_reference_values_of_the_format() {
    let device: Arc<dyn Device> = Arc::new(Host::new(0));
    let vectors: Value = serde_json::from_str(include_str!("../../../noise/testdata/noise_vectors.json")).unwrap();
    let mut complete = 0;
    for t in vectors["tokens"].as_array().unwrap() {
        let integer = |key: &str| t[key].as_u64().unwrap();
        let (vocab, key) = (integer("vocab") as usize, DrawKey::new(integer("noise_seed"), integer("draw") as u32));
        let stream = NoiseStream::new(key, integer("sequence_id"), integer("position") as u32);
        let (e, e0, _) = on_kernel(&device, &stream, vocab);
        assert!((f64::from(e0) / t["e0"].as_f64().unwrap() - 1.0).abs() < 3e-7);
        let entries: Vec<usize> = numbers(&t["entries"]).into_iter().map(|k| k as usize).collect();
        for (&k, exact) in entries.iter().zip(numbers(&t["e"])) {
            assert!((f64::from(e[k]) / exact - 1.0).abs() < 3e-7, "e[{k}]");
        }
        let logits: Vec<f32> = numbers(&t["logits"]).into_iter().map(|l| l as f32).collect();
        if logits.len() != vocab {
            continue; // the file has no logits for the large rows
        }
        complete += 1;
        let mut slice = Slice::new(vocab);
        slice.push(&logits, integer("token") as u32);
        (slice.positions[0], slice.sequence_ids[0]) = (stream.position, stream.sequence_id);
        let noise = Some(Noise::Dense { value_type: ValueType::F32, condition: false });
        let request = ExtractRequest { vocab, stride: vocab, keys: vec![key], noise, signals: Default::default() };
        let got = on_device(&device, &slice, &request).unwrap();
        assert!((f64::from(got.logprob[0]) - t["logprob"].as_f64().unwrap()).abs() < 1e-6);
        let Some(Dense::F32(xi)) = got.dense else { panic!("32-bit noise was asked for") };
        for (&k, exact) in entries.iter().zip(numbers(&t["xi"])) {
            assert!((f64::from(xi[k]) - exact).abs() < 2e-6 * exact.abs().max(1.0), "ξ[{k}]");
        }
        let tolerance = Tolerance::new(1e-3).unwrap();
        let noise = Some(Noise::Replay { tolerance, value_type: ValueType::F16, condition: true });
        crate::checks::check(&|s, a| on_device(&device, s, a), &slice, &ExtractRequest { noise, ..request }).unwrap();
    }
    assert!(complete > 0);
}
