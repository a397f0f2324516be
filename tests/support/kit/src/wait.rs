//! Waits for a predicate with a deadline.

use std::fmt::Debug;
use std::time::Duration;

/// Interval between the calls of [`until`].
const STEP: Duration = Duration::from_millis(5);

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
    loop {
        match look().await {
            Ok(value) => return value,
            Err(seen) if tokio::time::Instant::now() >= deadline => {
                panic!("waited {limit:?} for {what}; last seen: {seen:#?}")
            }
            Err(_) => tokio::time::sleep(STEP).await,
        }
    }
}
