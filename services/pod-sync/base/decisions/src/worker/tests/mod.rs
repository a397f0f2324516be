//! Plays random histories against the transitions, and against wrong conditions, which they must detect.

pub(super) mod faulty_policy;
mod history;
mod invariants;
mod mutants;
mod tables;
