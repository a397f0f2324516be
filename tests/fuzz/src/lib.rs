//! Fuzz targets on the stable toolchain, driven by proptest.
//!
//! A target ([`targets`]) reads bytes, gives them to the product and checks what the product makes of them: against a second
//! implementation, or against what another form of the same input gives. Its strategy makes inputs of the right shape and
//! mutates those of `corpus/TARGET`, where an input that failed is written to: it is replayed as an ordinary test from then on.
//!
//! [`fuzz::run`] bounds the processor time of each input and notices one that does not end.

pub mod bytes;
pub mod fuzz;
pub mod targets;
