//! Tests of the host's streams: work runs when it is waited for or earlier, in the order of its stream and of events.
//! What no device allows is reported.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use stillhouse_gpu::{Arg, Buffer, Device, Launch, Pinned, Stream};
use stillhouse_gpu_host::Host;

const SEEDS: u64 = 12;
const BYTES: usize = 64;

fn host(seed: u64) -> (Arc<Host>, Arc<dyn Device>) {
    let host = Arc::new(Host::new(seed));
    (Arc::clone(&host), host)
}

fn pinned(device: &Arc<dyn Device>, byte: u8) -> Pinned {
    let mut memory = Pinned::new(device, BYTES).unwrap();
    memory.fill(byte);
    memory
}

fn send(device: &dyn Device, stream: Stream, from: &[u8], to: &Buffer) {
    // SAFETY: both are as long as the buffer; whether the source stays unchanged is what the test examines
    unsafe { device.copy_to_device(stream, to.pointer(), from.as_ptr(), from.len()) }.unwrap();
}

fn fetch(device: &dyn Device, stream: Stream, from: &Buffer, to: &mut [u8]) {
    // SAFETY: both are as long as the buffer
    unsafe { device.copy_to_host(stream, to.as_mut_ptr(), from.pointer(), to.len()) }.unwrap();
}

fn wait(device: &dyn Device, stream: Stream) {
    device.wait(device.record(stream).unwrap()).unwrap();
}

#[test]
fn what_is_enqueued_is_not_done_before_it_is_waited_for() {
    let (_, device) = host(0);
    let (from, mut to) = (pinned(&device, 7), pinned(&device, 1));
    let buffer = Buffer::new(&device, BYTES).unwrap();
    send(device.as_ref(), Stream::Pass, &from, &buffer);
    fetch(device.as_ref(), Stream::Pass, &buffer, &mut to);
    assert_eq!(*to, [1; BYTES]);
    // Waiting for the other stream does not run it.
    wait(device.as_ref(), Stream::Extract);
    assert_eq!(*to, [1; BYTES]);
    wait(device.as_ref(), Stream::Pass);
    assert_eq!(*to, [7; BYTES]);
}

/// Passes bytes from one stream to the other, several times. Without the events that order them, they arrive too early
/// or too late for some seeds.
fn transfer_between_streams(device: &dyn Device, shared: &Arc<dyn Device>, in_order: bool) -> bool {
    let buffer = Buffer::from_bytes(shared, &[0; BYTES]).unwrap();
    let mut right = true;
    for byte in 1..5u8 {
        let (from, mut to) = (pinned(shared, byte), pinned(shared, 0));
        send(device, Stream::Pass, &from, &buffer);
        let written = device.record(Stream::Pass).unwrap();
        if in_order {
            device.stream_wait_event(Stream::Extract, written).unwrap();
        }
        fetch(device, Stream::Extract, &buffer, &mut to);
        let read = device.record(Stream::Extract).unwrap();
        if in_order {
            device.stream_wait_event(Stream::Pass, read).unwrap();
        }
        device.wait(read).unwrap();
        right &= *to == [byte; BYTES];
        wait(device, Stream::Pass);
    }
    right
}

#[test]
fn streams_wait_for_each_other_through_events_only() {
    for seed in 0..SEEDS {
        let (_, device) = host(seed);
        assert!(transfer_between_streams(device.as_ref(), &device, true), "seed {seed}");
    }
    let wrong = (0..SEEDS).filter(|seed| {
        let (_, device) = host(*seed);
        !transfer_between_streams(device.as_ref(), &device, false)
    });
    let wrong: Vec<u64> = wrong.collect();
    println!("without events: wrong for the seeds {wrong:?}");
    // If both streams are late, or only the reader is early, it reads before the writer writes.
    assert!(wrong.iter().any(|seed| seed % 4 == 0) && wrong.iter().any(|seed| seed % 4 == 2), "{wrong:?}");
}

#[test]
fn pinned_memory_that_changes_before_its_copy_is_told() {
    let reporting = (0..SEEDS).filter(|seed| {
        let (host, device) = host(*seed);
        let (mut from, buffer) = (pinned(&device, 7), Buffer::new(&device, BYTES).unwrap());
        send(device.as_ref(), Stream::Pass, &from, &buffer);
        from[5] = 8;
        let waited = device.wait(device.record(Stream::Pass).unwrap());
        let faults = host.faults();
        assert_eq!(waited.is_err(), !faults.is_empty(), "{faults:?}");
        if let [fault] = faults.as_slice() {
            assert_eq!(fault, "byte 5 of 64 of pinned memory changed before its copy was done");
            // The device gets the bytes at the time when the stream reaches the copy.
            assert_eq!(buffer.to_host(Stream::Pass).unwrap()[5], 8);
        }
        !faults.is_empty()
    });
    let reporting: Vec<u64> = reporting.collect();
    // Only a stream that copies at once is faster than the host's write.
    assert!(reporting.contains(&0) && reporting.contains(&2) && !reporting.contains(&1), "{reporting:?}");
}

#[test]
fn pinned_memory_that_is_given_back_with_a_copy_on_its_way_is_told() {
    for stream in [Stream::Pass, Stream::Extract] {
        let (host, device) = host(0);
        let (from, buffer) = (pinned(&device, 7), Buffer::new(&device, BYTES).unwrap());
        send(device.as_ref(), stream, &from, &buffer);
        drop(from);
        let error = device.wait(device.record(stream).unwrap()).unwrap_err().to_string();
        assert!(error.contains("64 bytes of pinned memory were given back"), "{error}");
        assert!(host.faults()[0].contains("64 bytes of pinned memory were given back"));
        assert_eq!(host.used_pinned(), 0);
        // The fault is reported once.
        wait(device.as_ref(), stream);
        assert!(host.faults().is_empty());
    }
}

#[test]
#[should_panic(expected = "given back with a copy on its way")]
fn a_fault_that_nobody_asks_for_ends_the_test() {
    let (host, device) = host(0);
    let (from, buffer) = (pinned(&device, 7), Buffer::new(&device, BYTES).unwrap());
    send(device.as_ref(), Stream::Pass, &from, &buffer);
    drop(from);
    drop((buffer, device, host));
}

#[test]
fn other_memory_is_copied_as_it_was_at_the_call() {
    let (_, device) = host(0);
    let buffer = Buffer::new(&device, BYTES).unwrap();
    let mut from = vec![7; BYTES];
    send(device.as_ref(), Stream::Pass, &from, &buffer);
    from.fill(8);
    drop(from);
    // A copy to such memory is complete when the call returns.
    let mut to = vec![0; BYTES];
    fetch(device.as_ref(), Stream::Pass, &buffer, &mut to);
    assert_eq!(to, [7; BYTES]);
}

#[test]
fn device_memory_is_freed_once_what_uses_it_is_done() {
    for seed in 0..SEEDS {
        let (host, device) = host(seed);
        let (from, mut to) = (pinned(&device, 7), pinned(&device, 0));
        let buffer = Buffer::new(&device, BYTES).unwrap();
        send(device.as_ref(), Stream::Pass, &from, &buffer);
        let written = device.record(Stream::Pass).unwrap();
        device.stream_wait_event(Stream::Extract, written).unwrap();
        fetch(device.as_ref(), Stream::Extract, &buffer, &mut to);
        drop(buffer);
        assert_eq!((host.used(), to[0]), (0, 7));
    }
}

#[test]
fn a_launch_whose_pointers_are_in_no_buffer_is_refused() {
    let (_, device) = host(0);
    let gone = Buffer::new(&device, BYTES).unwrap().pointer();
    let launch = Launch { kernel: "selftest_syncwarp", grid: [1, 1, 1], block: [32, 1, 1], shared_bytes: 0 };
    // SAFETY: the device refuses the launch
    let error = unsafe { device.launch(Stream::Pass, &launch, &[Arg::Pointer(gone)]) }.unwrap_err().to_string();
    assert!(error.contains("selftest_syncwarp: argument 0") && error.contains("points to no buffer"), "{error}");
}
