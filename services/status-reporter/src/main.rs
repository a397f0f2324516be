//! The `status-reporter` binary.

fn main() {}
