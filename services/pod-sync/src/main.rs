//! The `pod-sync` binary.

fn main() {}
