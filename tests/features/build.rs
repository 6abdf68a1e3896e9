//! Empty build script: cargo considers a package's build dependencies only if it has a build script.

fn main() {}
