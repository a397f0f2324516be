//! Waits for predicates instead of delays.

use std::fmt::Debug;
use std::time::Duration;

use tokio::time::Instant;

/// Interval between checks. Shorter ones would slow down the processes that are waited for.
const STEP: Duration = Duration::from_millis(20);

/// Limit for anything whose duration depends on the machine. It bounds failures only.
pub const LONG: Duration = Duration::from_secs(60);

/// Calls `look` until it returns a value, at most for `limit`.
///
/// # Panics
/// The limit passed. The message names `what` and the last state.
pub async fn until<T, S: Debug>(
    what: &str,
    limit: Duration,
    mut look: impl AsyncFnMut() -> Result<T, S>,
) -> T {
    let deadline = Instant::now() + limit;
    loop {
        match look().await {
            Ok(value) => return value,
            Err(seen) if Instant::now() >= deadline => {
                panic!("waited {limit:?} for {what}; last seen: {seen:#?}")
            }
            Err(_) => tokio::time::sleep(STEP).await,
        }
    }
}
