//! Budgets of tests whose size is a number of cases.

/// Environment variable of a long run. `make soak` sets it.
const SOAK_ENV: &str = "QUINTLET_SOAK";

/// Factor of a long run.
const SOAK: u32 = 50;

/// Returns whether this is a long run.
#[must_use]
pub fn is_long_run() -> bool {
    std::env::var_os(SOAK_ENV).is_some()
}

/// Returns the number of cases of a property: `of_gate`, or a multiple of it in a long run.
#[must_use]
pub fn cases(of_gate: u32) -> u32 {
    let factor = if is_long_run() { SOAK } else { 1 };
    of_gate.saturating_mul(factor)
}
