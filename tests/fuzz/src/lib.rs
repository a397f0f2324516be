//! Fuzz targets on the stable toolchain, driven by proptest.
//!
//! A target ([`targets`]) passes bytes to the product and checks the result: against a second implementation,
//! or against the result for another form of the same input. Its strategy generates structured inputs and
//! mutates those of `corpus/TARGET`. A failing input is written there, and is replayed as an ordinary test
//! from then on.
//!
//! [`fuzz::run`] limits the processor time of each input and detects one that does not end.

pub mod bytes;
pub mod fuzz;
pub mod targets;
