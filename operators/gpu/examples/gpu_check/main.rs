//! Checks and measures the kernels on a GPU: their correctness, the accuracy of each dtype, and the speed of a whole
//! job and of each kernel.
//!
//!     gpu_check [--device N | --host] [--driver TEXT] [--json FILE] [--seconds N] [--part NAME]... [--turns SHAPE]
//!
//! It reads nothing but its arguments; weights are random. Figures go to stdout at once and to FILE after each part, so
//! FILE has the finished parts when time runs out. `--host` runs everything on the host's emulation, with tiny shapes:
//! its figures mean nothing.
//!
//! | exit status | meaning |
//! |---|---|
//! | 0 | every check ran and passed |
//! | 1 | a check failed |
//! | 2 | it could not begin |
//! | 3 | time ran out before every check had run |
//!
//! A measurement that there was no time for is reported as skipped and does not change the exit status.
//!
//! | part | content |
//! |---|---|
//! | `conformance` | every kernel: noise against the CPU's encoder and judge, words bit for bit, nets against f64; equal bytes in any run and order |
//! | `accuracy` | each dtype against the CPU, for a small net; bf16, f16 and fp8 against f32 on the device, for a net of GPT-2's size |
//! | `ceilings` | the largest products and copies, which bound the rest |
//! | `throughput` | token ids to corrections in host memory, as in a job, for four shapes; then the share of each kernel |
//!
//! `--turns SHAPE` loads a shape, then measures once per line `LENGTH BATCHES` of stdin, so that another program can be
//! measured in alternation.

mod accuracy;
mod bits;
mod ceilings;
mod conformance;
mod counting_device;
mod job;
mod nets;
mod reference;
mod report;
mod throughput;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, io};

use stillhouse_gpu::Device;
use stillhouse_gpu_host::Host;

use counting_device::CountingDevice;
use report::Report;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// The state that every part gets.
struct Check {
    device: Arc<dyn Device>,
    counting: Arc<CountingDevice>,
    host: bool,
    report: Report,
    /// Operations per second of the fastest bf16 product, once measured.
    ceiling: Option<f64>,
    /// The end of the part's time.
    deadline: Instant,
}

impl Check {
    /// Whether there is time for work of about `seconds` seconds. Always true on the host, where nothing is measured.
    fn has_time(&self, seconds: f64) -> bool {
        self.host || Instant::now() + Duration::from_secs_f64(seconds) < self.deadline
    }
}

type Part = fn(&mut Check) -> Outcome<()>;

/// The parts in order, with the share of the time that each may take; unused time goes to the next part. The
/// correctness checks come first and get the most.
const PARTS: [(&str, f64, Part); 4] = [
    ("conformance", 0.60, conformance::run),
    ("accuracy", 0.08, accuracy::run),
    ("ceilings", 0.06, ceilings::run),
    ("throughput", 0.26, throughput::run),
];

struct Options {
    host: bool,
    device: usize,
    /// The driver's version as the caller states it, in addition to what the driver reports.
    driver: String,
    json: Option<String>,
    seconds: f64,
    parts: Vec<String>,
    turns: Option<String>,
}

fn main() -> ExitCode {
    match check() {
        Ok(Verdict::Passed) => ExitCode::SUCCESS,
        Ok(Verdict::Failed) => ExitCode::from(1),
        Ok(Verdict::Unchecked) => ExitCode::from(3),
        Err(error) => {
            eprintln!("gpu_check: {error}");
            ExitCode::from(2)
        }
    }
}

/// The result of all checks.
enum Verdict {
    Passed,
    Failed,
    Unchecked,
}

fn check() -> Outcome<Verdict> {
    let options = options(env::args().skip(1))?;
    let (device, driver): (Arc<dyn Device>, String) =
        if options.host { (Arc::new(Host::with_memory(0, 16 << 30)), "none".into()) } else { open(options.device)? };
    let counting = Arc::new(CountingDevice::new(device));
    let device: Arc<dyn Device> = Arc::clone(&counting) as Arc<dyn Device>;
    let began = Instant::now();
    let driver = format!("{} {driver}", options.driver);
    let report = Report::new(&device, driver.trim(), options.json);
    let mut check = Check { device, counting, host: options.host, report, ceiling: None, deadline: began };
    if let Some(shape) = options.turns {
        throughput::measure_turns(&check, &shape, &mut io::stdin().lines(), &mut io::stdout())?;
        return Ok(Verdict::Passed);
    }
    check.report.begin();
    let mut end = 0.0;
    for (name, share, part) in PARTS {
        end += share;
        if !(options.parts.is_empty() || options.parts.iter().any(|requested| requested == name)) {
            continue;
        }
        // A single part gets all of the time.
        let end = if options.parts.len() == 1 { 1.0 } else { end };
        check.deadline = began + Duration::from_secs_f64(options.seconds * end);
        check.report.part = name;
        if let Err(error) = part(&mut check) {
            check.report.verdict("error", false, &error.to_string());
        }
        check.report.write()?;
    }
    Ok(match (check.report.all_passed(), check.report.all_checked()) {
        (false, _) => Verdict::Failed,
        (true, false) => Verdict::Unchecked,
        (true, true) => Verdict::Passed,
    })
}

#[cfg(feature = "cuda")]
fn open(ordinal: usize) -> Outcome<(Arc<dyn Device>, String)> {
    let device = stillhouse_gpu::cuda::Cuda::open(ordinal)?;
    let mut version = 0;
    // SAFETY: an opened device proves that the driver is loaded; it writes one number
    unsafe { cudarc::driver::sys::cuDriverGetVersion(&raw mut version) }.result()?;
    Ok((Arc::new(device), format!("for CUDA {}.{}", version / 1000, version % 1000 / 10)))
}

#[cfg(not(feature = "cuda"))]
fn open(ordinal: usize) -> Outcome<(Arc<dyn Device>, String)> {
    Err(format!("cuda:{ordinal}: this program was built without the feature cuda, valid: --host").into())
}

fn options(mut arguments: impl Iterator<Item = String>) -> Outcome<Options> {
    let mut options = Options {
        host: false,
        device: 0,
        driver: String::new(),
        json: None,
        seconds: 240.0,
        parts: Vec::new(),
        turns: None,
    };
    while let Some(name) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{name}: got nothing, valid: a value"));
        match name.as_str() {
            "--host" => options.host = true,
            "--device" => options.device = value()?.parse()?,
            "--driver" => options.driver = value()?,
            "--json" => options.json = Some(value()?),
            "--seconds" => options.seconds = value()?.parse()?,
            "--turns" => options.turns = Some(value()?),
            "--part" => {
                let part = value()?;
                let valid = PARTS.map(|(name, ..)| name);
                if !valid.contains(&part.as_str()) {
                    return Err(format!("--part: got {part}, valid: {}", valid.join(", ")).into());
                }
                options.parts.push(part);
            }
            _ => {
                let valid = "--host, --device N, --driver TEXT, --json FILE, --seconds N, --part NAME, --turns SHAPE";
                return Err(format!("arguments: got {name}, valid: {valid}").into());
            }
        }
    }
    Ok(options)
}
