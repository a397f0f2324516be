//! The `quintctl` binary.

fn main() {}
