//! Cargo looks at the dependencies of build scripts only where there is one.

fn main() {}
