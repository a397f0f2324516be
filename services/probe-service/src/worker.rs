//! The loop of one probe: ticks at a fixed rate, and sooner when the way opens.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep};

use crate::decide::Gate;
use crate::prober::Shared;
use crate::slot::Slot;

/// Evaluates until it is aborted, for the first time after `jitter`.
///
/// Missed ticks collapse into one. A container that has just started, or whose initial delay has just passed, is
/// probed at once and the rate counts from there; nothing else moves the ticks.
pub(crate) async fn run(shared: Arc<Shared>, slot: Arc<Slot>, jitter: Duration) {
    let mut ticker = interval_at(Instant::now() + jitter, slot.period());
    ticker.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        let delay = match slot.gate(shared.clock.boot()) {
            Gate::After(delay) => Some(delay),
            Gate::Idle(_) | Gate::Stopped(_) | Gate::Probe(_) => None,
        };
        // A dropped tick stays due, a dropped wake stays set, and the delay is computed anew.
        tokio::select! {
            _ = ticker.tick() => {}
            () = slot.wake.notified() => {
                if !matches!(slot.gate(shared.clock.boot()), Gate::Probe(_)) {
                    continue;
                }
                ticker.reset();
            }
            () = sleep(delay.unwrap_or_default()), if delay.is_some() => ticker.reset(),
        }
        slot.evaluate(&shared).await;
    }
}
