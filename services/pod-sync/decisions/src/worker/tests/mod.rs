//! Plays random histories against the transitions, and against wrong conditions, which they must detect.

mod history;
mod invariants;
mod mutants;
mod tables;
