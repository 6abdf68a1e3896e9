//! Measures the peak of this machine's instructions for each [`Arithmetic`], with loops of independent sums in
//! registers. `peak [SECONDS]` prints GFLOP/s (two operations per product) on one thread and on all, the best of many
//! short runs.

#[path = "../benches/peak/mod.rs"]
mod peak;

use stillhouse_cpu::{Arithmetic, level_name};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let seconds = std::env::args().nth(1).map_or(Ok(0.5), |s| s.parse::<f64>())?;
    let threads = std::thread::available_parallelism()?.get();
    println!("{:<6} {:<14} {:>12} {:>8} {threads}", "", "", "1 thread", "threads:");
    for arithmetic in Arithmetic::ALL.into_iter().filter(|a| a.is_available()) {
        for (instructions, work) in peak::peak_loops(arithmetic) {
            let [one, all] = [1, threads].map(|threads| peak::gflops(work, threads, seconds));
            println!("{:<6} {instructions:<14} {one:>12.0} {all:>12.0}", arithmetic.name());
        }
        println!("{:<6} products run by {}", arithmetic.name(), level_name(arithmetic));
    }
    Ok(())
}
