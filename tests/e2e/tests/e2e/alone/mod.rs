//! Tests that count what happens on the whole machine. `.config/nextest.toml` runs each of them without any
//! other test.

mod bench;
mod process_ids;
mod sub_second_probes;
