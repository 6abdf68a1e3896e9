//! Tests of the emulation itself, with kernels whose results are known: correct kernels are correct in every order of
//! the threads, and faulty ones are detected.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use half::{bf16, f16};
use stillhouse_gpu::{Arg, Buffer, Device, GpuError, Launch, Result, Stream};
use stillhouse_gpu_host::Host;

/// Number of thread orders: 0 is by number, the others are random. A faulty kernel fails in some of them, a correct one
/// in none.
const SEEDS: u64 = 20;
const BAD_ACCESS: &str = "code 4";
const TOO_LARGE: &str = "1,024 threads";
const DEADLOCK: &str = "for ever";

fn host(schedule_seed: u64) -> Arc<dyn Device> {
    Arc::new(Host::new(schedule_seed))
}

fn launch(
    device: &Arc<dyn Device>,
    kernel: &'static str,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    args: &[Arg],
) -> Result<()> {
    let launch = Launch { kernel, grid, block, shared_bytes };
    // SAFETY: every test passes the arguments that its kernel declares
    unsafe { device.launch(Stream::Pass, &launch, args)? };
    device.wait(device.record(Stream::Pass)?)
}

fn line(threads: u32) -> [u32; 3] {
    [threads, 1, 1]
}

trait Word: Copy + Default + PartialEq + std::fmt::Debug {
    const BYTES: usize;
    fn put(self, to: &mut Vec<u8>);
    fn get(bytes: &[u8]) -> Self;
}

macro_rules! words {
    ($($type:ty),*) => {$(
        impl Word for $type {
            const BYTES: usize = size_of::<$type>();
            fn put(self, to: &mut Vec<u8>) {
                to.extend_from_slice(&self.to_le_bytes());
            }
            fn get(bytes: &[u8]) -> Self {
                <$type>::from_le_bytes(bytes.try_into().unwrap())
            }
        }
    )*};
}
words!(u16, u32, u64, f32, f64);

fn upload<T: Word>(device: &Arc<dyn Device>, values: &[T]) -> Buffer {
    let mut bytes = Vec::with_capacity(values.len() * T::BYTES);
    values.iter().for_each(|value| value.put(&mut bytes));
    Buffer::from_bytes(device, &bytes).unwrap()
}

fn download<T: Word>(buffer: &Buffer) -> Vec<T> {
    buffer.to_host(Stream::Pass).unwrap().chunks_exact(T::BYTES).map(T::get).collect()
}

fn assert_fails(result: Result<()>, kernel: &str, with: &str) {
    match result {
        Err(GpuError::Failed { device, call, message, lost: false }) => {
            assert_eq!((device.as_str(), call.as_str()), ("host", kernel));
            assert!(message.contains(with), "{kernel}: {message}");
        }
        other => panic!("{kernel}: {other:?}"),
    }
}

/// Launches a kernel that writes one output of words in every order, and counts the orders with a wrong result.
fn wrong_orders(
    kernel: &'static str,
    grid: u32,
    block: u32,
    shared_bytes: u32,
    more: &[Arg],
    expected: &[u32],
) -> usize {
    let wrong = |seed: &u64| {
        let device = host(*seed);
        let out = upload(&device, &vec![0u32; expected.len()]);
        let mut args = vec![Arg::Pointer(out.pointer())];
        args.extend_from_slice(more);
        launch(&device, kernel, line(grid), line(block), shared_bytes, &args).unwrap();
        download::<u32>(&out) != expected
    };
    (0..SEEDS).filter(wrong).count()
}

#[test]
fn a_reduction_is_right_in_every_order_and_a_race_shows() {
    let values: Vec<f32> = (0..10_000u32).map(|i| (i * 37 % 101) as f32).collect();
    let mut blocks = [0f32; 8];
    for (i, value) in values.iter().enumerate() {
        blocks[i / 512 % 8] += value;
    }
    let mut wrong = 0;
    for seed in 0..SEEDS {
        let device = host(seed);
        let (values, out) = (upload(&device, &values), upload(&device, &[0f32; 8]));
        let args = [Arg::Pointer(values.pointer()), Arg::Pointer(out.pointer()), Arg::U32(10_000)];
        launch(&device, "selftest_reduce", line(8), line(512), 0, &args).unwrap();
        assert_eq!(download::<f32>(&out), blocks, "seed {seed}");
        launch(&device, "selftest_reduce_race", line(8), line(512), 0, &args).unwrap();
        wrong += usize::from(download::<f32>(&out) != blocks);
    }
    assert!(wrong > 0, "the race showed in none of {SEEDS} orders");
}

#[test]
fn a_forgotten_barrier_shows() {
    let rotated: Vec<u32> = (0..192).map(|thread| (thread % 96 + 50) % 96).collect();
    assert_eq!(wrong_orders("selftest_rotate", 2, 96, 384, &[Arg::U32(50)], &rotated), 0);
    assert!(wrong_orders("selftest_rotate_race", 2, 96, 384, &[Arg::U32(50)], &rotated) > 0);

    let squares: Vec<u32> = (0..32).map(|lane| (lane + 31) % 32).map(|from| from * from).collect();
    assert_eq!(wrong_orders("selftest_syncwarp", 1, 32, 0, &[], &squares), 0);
    assert!(wrong_orders("selftest_syncwarp_race", 1, 32, 0, &[], &squares) > 0);

    assert!(wrong_orders("selftest_atomics_race", 4, 96, 0, &[], &[384]) > 0);
}

#[test]
fn fragments_are_loaded_as_ptx_says() {
    // Matrix i holds 64·i + 8·row + column. A lane gets two neighbours of a row, or of a column with `trans`.
    let pair = |i: u32, lane: u32| 64 * i + 8 * (lane / 4) + 2 * (lane % 4);
    let across = |i: u32, lane: u32| 64 * i + 8 * (2 * (lane % 4)) + lane / 4;
    let mut expected = Vec::new();
    for matrices in [4, 2] {
        let each = || (0..matrices).flat_map(|i| (0..32).map(move |lane| (i, lane)));
        expected.extend(each().map(|(i, lane)| pair(i, lane) | (pair(i, lane) + 1) << 16));
        expected.extend(each().map(|(i, lane)| across(i, lane) | (across(i, lane) + 8) << 16));
    }
    assert_eq!(wrong_orders("selftest_ldmatrix", 1, 32, 0, &[], &expected), 0);

    let device = host(0);
    let out = upload(&device, &[0u32; 32]);
    let args = [Arg::Pointer(out.pointer())];
    let result = launch(&device, "selftest_ldmatrix_misaligned", line(1), line(32), 0, &args);
    assert_fails(result, "selftest_ldmatrix_misaligned", BAD_ACCESS);
}

/// Pseudo-random numbers in (-4, 4), the same in every run.
fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1u32 << 21) as f32 - 4.0
    };
    (0..count).map(|_| next()).collect()
}

fn products(plain: &'static str, shared: &'static str, narrow: fn(f32) -> u16, wide: fn(u16) -> f32) {
    for seed in 0..8u32 {
        let a: Vec<u16> = numbers(4 * seed + 1, 256).into_iter().map(narrow).collect();
        let b: Vec<u16> = numbers(4 * seed + 2, 128).into_iter().map(narrow).collect();
        let c = numbers(4 * seed + 3, 128);
        let transposed: Vec<u16> = (0..128).map(|i| b[i % 16 * 8 + i / 16]).collect();
        let mut expected = c.clone();
        for (at, sum) in expected.iter_mut().enumerate() {
            let (row, column) = (at / 8, at % 8);
            for k in 0..16 {
                *sum += wide(a[row * 16 + k]) * wide(b[k * 8 + column]);
            }
        }
        let device = host(u64::from(seed));
        let (a, b, bt) = (upload(&device, &a), upload(&device, &b), upload(&device, &transposed));
        let (c, d) = (upload(&device, &c), upload(&device, &[0f32; 256]));
        let [a, b, bt, c, to] = [&a, &b, &bt, &c, &d].map(|buffer| Arg::Pointer(buffer.pointer()));
        launch(&device, plain, line(1), line(32), 0, &[a, b, c, to]).unwrap();
        assert_eq!(download::<f32>(&d)[..128], expected, "{plain}, seed {seed}");
        launch(&device, shared, line(1), line(32), 0, &[a, b, bt, c, to]).unwrap();
        let both = download::<f32>(&d);
        assert_eq!(both[..128], expected, "{shared}, seed {seed}: a transposing load");
        assert_eq!(both[128..], expected, "{shared}, seed {seed}: a plain load");
    }
}

#[test]
fn tensor_core_products_are_the_naive_ones() {
    let (bits, value) = (|x| bf16::from_f32(x).to_bits(), |bits| bf16::from_bits(bits).to_f32());
    products("selftest_mma_bf16", "selftest_mma_shared_bf16", bits, value);
    let (bits, value) = (|x| f16::from_f32(x).to_bits(), |bits| f16::from_bits(bits).to_f32());
    products("selftest_mma_f16", "selftest_mma_shared_f16", bits, value);
}

fn conversions(kernel: &'static str, narrow: fn(f32) -> u16, wide: fn(u16) -> f32, infinity: u16) {
    // Every value, the midpoints between neighbours, the values next to the midpoints, and special values.
    let mut values =
        vec![f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, f32::MAX, f32::MIN_POSITIVE];
    values.extend([1, 0x7F80_0001, 0x0080_0001].map(f32::from_bits));
    for bits in 0..infinity - 1 {
        let (low, high) = (f64::from(wide(bits)), f64::from(wide(bits + 1)));
        let middle = f64::midpoint(low, high) as f32;
        for value in [low as f32, middle, middle.next_up(), middle.next_down()] {
            values.extend([value, -value]);
        }
    }
    let device = host(0);
    let count = values.len();
    let input = upload(&device, &values);
    let (narrowed, widened) = (upload(&device, &vec![0u16; 2 * count]), upload(&device, &vec![0f32; 65536]));
    let args = [&input, &narrowed, &widened].map(|buffer| Arg::Pointer(buffer.pointer()));
    let args = [args[0], args[1], args[2], Arg::U32(count as u32)];
    launch(&device, kernel, line((count as u32).div_ceil(256)), line(256), 0, &args).unwrap();
    for (bits, got) in (0..=u16::MAX).zip(download::<f32>(&widened)) {
        let expected = wide(bits);
        assert!(got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan(), "{kernel}: {bits:#x}: {got}");
    }
    let got = download::<u16>(&narrowed);
    for (i, value) in values.into_iter().enumerate() {
        // NVIDIA's conversions return a single NaN.
        let expected = if value.is_nan() { 0x7FFF } else { narrow(value) };
        assert_eq!((got[i], got[count + i]), (expected, expected), "{kernel}: {value:e}");
    }
}

#[test]
fn conversions_round_to_the_nearest() {
    let (bits, value) = (|x| bf16::from_f32(x).to_bits(), |bits| bf16::from_bits(bits).to_f32());
    conversions("selftest_convert_bf16", bits, value, 0x7F80);
    let (bits, value) = (|x| f16::from_f32(x).to_bits(), |bits| f16::from_bits(bits).to_f32());
    conversions("selftest_convert_f16", bits, value, 0x7C00);
}

#[test]
fn copies_that_run_ahead_arrive_when_they_are_waited_for() {
    const THREADS: u32 = 64;
    const TILES: u32 = 9;
    const VALID: u32 = 7;
    let words: Vec<u32> = (0..3 * TILES * THREADS * 4).map(|i| i.wrapping_mul(2_654_435_761)).collect();
    let sums: Vec<u32> = words
        .chunks((TILES * THREADS * 4) as usize)
        .map(|block| block[..(VALID * THREADS * 4) as usize].iter().fold(0u32, |sum, word| sum.wrapping_add(*word)))
        .collect();
    let mut early = 0;
    for seed in 0..SEEDS {
        let device = host(seed);
        let input = upload(&device, &words);
        let run = |kernel: &'static str, pointer: u64, shared_bytes: u32| {
            let out = upload(&device, &[0u32; 3]);
            let args = [Arg::Pointer(pointer), Arg::Pointer(out.pointer()), Arg::U32(TILES), Arg::U32(VALID)];
            launch(&device, kernel, line(3), line(THREADS), shared_bytes, &args).map(|()| download::<u32>(&out))
        };
        let buffers = 2 * THREADS * 16;
        assert_eq!(run("selftest_copy", input.pointer(), buffers).unwrap(), sums, "seed {seed}");
        early += u64::from(run("selftest_copy_early", input.pointer(), buffers).unwrap() != sums);
        assert_fails(run("selftest_copy", input.pointer() + 4, buffers).map(drop), "selftest_copy", BAD_ACCESS);
        assert_fails(run("selftest_copy", input.pointer(), buffers / 2).map(drop), "selftest_copy", BAD_ACCESS);
    }
    assert_eq!(early, SEEDS, "a tile that has not arrived is never there");
}

#[test]
fn unwritten_and_foreign_shared_memory_shows() {
    for seed in 0..6 {
        let device = host(seed);
        let out = upload(&device, &[0u32; 128]);
        let args = [Arg::Pointer(out.pointer())];
        launch(&device, "selftest_uninitialised", line(1), line(64), 256, &args).unwrap();
        let got = download::<u32>(&out);
        assert!(got[7] > 1 && got[71] == got[7], "seed {seed}: {:#x}, {:#x}", got[7], got[71]);
        assert_eq!(got[8], 1);
    }
    let device = host(0);
    let out = upload(&device, &[0u32; 32]);
    let result = launch(&device, "selftest_overrun", line(1), line(32), 0, &[Arg::Pointer(out.pointer())]);
    assert_fails(result, "selftest_overrun", BAD_ACCESS);
}

#[test]
fn atomics_lose_nothing() {
    const THREADS: u32 = 4 * 96;
    let mixed = || (0..THREADS).map(|id| id * 7 % 1009);
    let expected = [
        (0..THREADS).sum(),
        mixed().max().unwrap(),
        mixed().min().unwrap() + 5,
        u32::MAX,
        THREADS,
        (THREADS as i32 - 1 - 5000) as u32,
        (1 - THREADS as i32) as u32,
    ];
    for seed in 0..SEEDS {
        let device = host(seed);
        let words = upload(&device, &[0, 0, u32::MAX, 0, 0, (-2_000_000i32) as u32, 1000]);
        let (long, single, double) = (upload(&device, &[0u64; 2]), upload(&device, &[0f32]), upload(&device, &[0f64]));
        let args = [&words, &long, &single, &double].map(|buffer| Arg::Pointer(buffer.pointer()));
        launch(&device, "selftest_atomics", line(4), line(96), 0, &args).unwrap();
        assert_eq!(download::<u32>(&words), expected, "seed {seed}");
        let threads = u64::from(THREADS);
        assert_eq!(download::<u64>(&long), [(threads << 32) + threads * (threads - 1) / 2, (threads - 1) << 33]);
        assert_eq!(
            (download::<f32>(&single)[0], download::<f64>(&double)[0]),
            (THREADS as f32 / 2.0, f64::from(THREADS) / 4.0)
        );
    }
}

#[test]
fn divergence_is_an_error_and_no_hang() {
    for seed in 0..4 {
        // Case 4 waits for a value that nothing writes. Detecting that takes longest.
        for case in (0..6).filter(|case| *case != 4 || seed < 2) {
            let device = host(seed);
            let out = upload(&device, &[0u32; 3]);
            let args = [Arg::Pointer(out.pointer()), Arg::U32(case)];
            let result = launch(&device, "selftest_divergence", line(2), line(64), 0, &args);
            assert_fails(result, "selftest_divergence", DEADLOCK);
            // The next launch is unaffected.
            let words = upload(&device, &[0u32; 32]);
            launch(&device, "selftest_syncwarp", line(1), line(32), 0, &[Arg::Pointer(words.pointer())]).unwrap();
            assert_eq!(download::<u32>(&words)[5], 16);
        }
    }
}

#[test]
fn shuffles_stay_within_their_width() {
    let value = |thread: u32| 0x0123_4567_0000_0000u64.wrapping_mul(u64::from(thread) + 1) + u64::from(thread);
    for seed in 0..5 {
        let device = host(seed);
        let out = upload(&device, &[0u64; 512]);
        launch(&device, "selftest_shuffles", line(1), line(64), 0, &[Arg::Pointer(out.pointer())]).unwrap();
        for (thread, got) in (0..64u32).zip(download::<u64>(&out).chunks_exact(8)) {
            let (warp, lane) = (thread & !31, thread % 32);
            let exchanged = lane ^ 9;
            let expected = [
                value(warp + 3),
                value(if lane % 8 >= 2 { thread - 2 } else { thread }),
                value(if lane % 16 + 5 < 16 { thread + 5 } else { thread }),
                value(if exchanged > lane | 7 { thread } else { warp + exchanged }),
                (f64::from(warp + (lane ^ 31)) / 3.0).to_bits(),
                u64::from(if lane < 16 { warp + 901 } else { warp + 16 + (lane + 1) % 16 }),
                u64::from((if lane == 31 { thread as f32 } else { (thread + 1) as f32 }).to_bits()),
                value(warp + (thread * 5 + 33) % 32),
            ];
            assert_eq!(got, expected, "seed {seed}, thread {thread}");
        }
    }
}

#[test]
fn votes_and_numbers_of_threads() {
    for seed in 0..5 {
        let device = host(seed);
        let out = upload(&device, &vec![0u32; 6 * 96 * 8]);
        launch(&device, "selftest_votes", [1, 2, 3], [4, 3, 8], 0, &[Arg::Pointer(out.pointer())]).unwrap();
        for (at, got) in (0..6 * 96u32).zip(download::<u32>(&out).chunks_exact(8)) {
            let (block, thread) = (at / 96, at % 96);
            let ballot =
                (0..32).filter(|lane| ((thread & !31) + lane) % 3 == 0).fold(0, |bits, lane| bits | 1u32 << lane);
            let high = (u64::from(thread.wrapping_mul(0x9E37_79B9)) * 0xDEAD_BEEF) >> 32;
            let first = if thread == 0 { 0 } else { thread.trailing_zeros() + 1 };
            let expected = [
                ballot,
                [1, 2, 0][(thread / 32) as usize],
                20,
                if block == 1 { 2 } else { 0 } + u32::from(block != 2),
                ((thread % 4) << 16) | ((thread / 4 % 3) << 8) | (thread / 12),
                ((block % 2) << 8) | (block / 2),
                high as u32 ^ thread.reverse_bits(),
                thread.count_ones() + (first << 8) + (thread.leading_zeros() << 16),
            ];
            assert_eq!(got, expected, "seed {seed}, block {block}, thread {thread}");
        }
    }
}

#[test]
fn what_no_device_could_launch_is_an_error() {
    const MAX_SHARED_BYTES: u32 = 227 << 10;
    let device = host(0);
    let out = upload(&device, &[0u32; 4096]);
    let args = [Arg::Pointer(out.pointer()), Arg::U32(1)];
    let rotate = |grid, block, shared| launch(&device, "selftest_rotate", line(grid), line(block), shared, &args);
    rotate(1, 32, MAX_SHARED_BYTES).unwrap();
    for (grid, block, shared_bytes) in [(1, 1025, 8192), (1, 32, MAX_SHARED_BYTES + 1), (0, 32, 128)] {
        assert_fails(rotate(grid, block, shared_bytes), "selftest_rotate", TOO_LARGE);
    }
    // Declared shared memory counts too, and so does the kernel's declared maximum of threads.
    let result = launch(&device, "selftest_uninitialised", line(1), line(32), MAX_SHARED_BYTES, &args[..1]);
    assert_fails(result, "selftest_uninitialised", TOO_LARGE);
    let args = [Arg::Pointer(out.pointer()), Arg::Pointer(out.pointer()), Arg::U32(1)];
    let result = launch(&device, "selftest_reduce", line(1), line(513), 0, &args);
    assert_fails(result, "selftest_reduce", TOO_LARGE);
    assert_fails(launch(&device, "nothing", line(1), line(1), 0, &[]), "nothing", "no such kernel");
}
