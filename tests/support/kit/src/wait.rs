//! Waits for a predicate with a deadline.

use std::fmt::Debug;
use std::time::Duration;

/// Interval between the first calls of [`until`].
const STEP: Duration = Duration::from_millis(5);
/// Longest interval. A long wait of a process with virtual time would mostly look.
const LONGEST_STEP: Duration = Duration::from_millis(40);

/// Calls `look` until it returns a value, at most for `limit`.
///
/// # Panics
/// Panics after the limit; the message has `what` and the last state.
pub async fn until<T, S: Debug>(
    what: &str,
    limit: Duration,
    mut look: impl AsyncFnMut() -> Result<T, S>,
) -> T {
    let deadline = tokio::time::Instant::now() + limit;
    let mut steps = (1..).map(|calls| (STEP * calls / 8).clamp(STEP, LONGEST_STEP));
    loop {
        match look().await {
            Ok(value) => return value,
            Err(seen) if tokio::time::Instant::now() >= deadline => {
                panic!("waited {limit:?} for {what}; last seen: {seen:#?}")
            }
            Err(_) => tokio::time::sleep(steps.next().unwrap_or(LONGEST_STEP)).await,
        }
    }
}
