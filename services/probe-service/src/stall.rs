//! Detects that this process did not run for a while because it was stopped, starved of CPU, or suspended
//! with the machine.

use std::pin::pin;
use std::time::Duration;

use quintlet_kit::clock::Clock;

/// Interval between checks while work is in progress.
const TICK: Duration = Duration::from_millis(100);
/// A check that is late by more than this is a stall.
pub(crate) const LIMIT: Duration = Duration::from_millis(500);

/// Runs `work`, and returns its output with whether the process stalled meanwhile.
pub(crate) async fn watch<T>(clock: &Clock, work: impl Future<Output = T>) -> (T, bool) {
    let mut work = pin!(work);
    let mut last = clock.boot();
    let mut stalled = false;
    let late = |last: Duration| clock.boot().saturating_sub(last) > TICK.saturating_add(LIMIT);
    loop {
        // A dropped sleep loses one check; the work is pinned outside.
        tokio::select! {
            biased;
            done = &mut work => return (done, stalled || late(last)),
            () = tokio::time::sleep(TICK) => {
                stalled |= late(last);
                last = clock.boot();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_clock_jump_during_work_is_a_stall_and_long_work_is_not() {
        let clock = Clock::fixed(Default::default(), Duration::from_secs(100));
        for (jumps, stalled) in [(vec![90; 20], false), (vec![90, 700, 90], true), (vec![90, 90, 601], true)]
        {
            let work = async {
                for jump in jumps {
                    tokio::time::sleep(Duration::from_millis(90)).await;
                    clock.advance(Duration::from_millis(jump));
                }
            };
            assert_eq!(watch(&clock, work).await.1, stalled);
        }
    }
}
