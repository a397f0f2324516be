//! Profiles of the process in which they are taken, in the format of pprof: samples of its CPU use, and the
//! allocations of its heap if the allocator records them.
//!
//! A profile has addresses, and the build IDs of the files that they belong to, not names of functions: a
//! service does not read symbols. Both sides of a transfer use [`format::Profile`], and `quintctl` adds the
//! names.
//!
//! Nothing runs while no profile is taken: the signal handler and the timer exist during [`cpu::Recording`].

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod cpu;
pub mod format;
pub mod heap;
mod mappings;
mod scratch;
mod stacks;
