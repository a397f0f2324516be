//! The `probe-service` binary.

fn main() {}
