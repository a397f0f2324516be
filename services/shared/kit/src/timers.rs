//! Timers of periodic work that fire together, so that an idle process wakes seldom.
//!
//! Loops of one period that begin at different times would each wake the process. [`pause`] ends at a
//! multiple of its period since the boot, so that all loops of 10 s run one after the other, together with
//! every second run of loops of 5 s. It is for periodic work of a process whose exact time does not matter,
//! not for time limits, back-offs, or periods that a pod names. For those periods, [`slotted`] moves a time
//! by as much as the caller allows.

use std::sync::OnceLock;
use std::time::Duration;

use tokio::time::Instant;

use crate::clock::Clock;

/// The instant of the boot. Without it, timers are not aligned.
static BOOT: OnceLock<Instant> = OnceLock::new();

/// Aligns the timers of this process from now on.
pub fn align() {
    if let Some(boot) = Instant::now().checked_sub(Clock::system().boot()) {
        let _ = BOOT.set(boot);
    }
}

/// Waits for `period`; if timers are aligned, between half and one and a half of it. A loop whose work takes
/// less than half of the period runs once per period.
pub async fn pause(period: Duration) {
    tokio::time::sleep_until(next_tick(period)).await;
}

/// Returns the time at which a [`pause`] that begins now ends.
#[must_use]
pub fn next_tick(period: Duration) -> Instant {
    next(BOOT.get().copied(), Instant::now(), period)
}

/// Returns the time of the first tick of an interval that begins now; if timers are aligned, at most one and
/// a half periods from now.
#[must_use]
pub fn first_tick(period: Duration) -> Instant {
    if BOOT.get().is_some() { next_tick(period) } else { Instant::now() }
}

/// Returns `at`; if timers are aligned, the first multiple of `slot` since the boot that is not before `at`.
#[must_use]
pub fn slotted(at: Instant, slot: Duration) -> Instant {
    slot_at(BOOT.get().copied(), at, slot)
}

/// Waits between checks of files that another program may replace, such as certificates. They become longer
/// with the time for which the files have not changed: what is replaced each minute is noticed within two
/// seconds, and files that stay cost hardly a wake-up.
#[derive(Debug)]
pub struct FileChecks {
    changed: Instant,
    longest: Duration,
}

/// Waits of [`FileChecks`] in seconds. Each divides ten, so that aligned timers fire together.
const CHECK_SECONDS: [u64; 4] = [10, 5, 2, 1];

impl FileChecks {
    /// Returns the waits for files that have changed now.
    #[must_use]
    pub fn new(longest: Duration) -> Self {
        Self { changed: Instant::now(), longest }
    }

    /// Starts again with the shortest wait.
    pub fn reset(&mut self) {
        self.changed = Instant::now();
    }

    /// Returns the next wait: at most a 32nd of the time since the last change, but at least a second.
    #[must_use]
    pub fn wait(&self) -> Duration {
        let most = self.changed.elapsed().checked_div(32).unwrap_or_default().min(self.longest);
        let fits = CHECK_SECONDS.into_iter().map(Duration::from_secs).find(|wait| *wait <= most);
        fits.unwrap_or(Duration::from_secs(1))
    }

    /// Waits until the next check.
    pub async fn pause(&self) {
        pause(self.wait()).await;
    }
}

fn slot_at(boot: Option<Instant>, at: Instant, slot: Duration) -> Instant {
    let Some(boot) = boot else { return at };
    let past = at.saturating_duration_since(boot).as_nanos().checked_rem(slot.as_nanos()).unwrap_or_default();
    let past = Duration::from_nanos(u64::try_from(past).unwrap_or_default());
    let wait = if past.is_zero() { past } else { slot.saturating_sub(past) };
    at.checked_add(wait).unwrap_or(at)
}

fn next(boot: Option<Instant>, now: Instant, period: Duration) -> Instant {
    let whole = now.checked_add(period).unwrap_or(now);
    let Some(boot) = boot else { return whole };
    let half = period.checked_div(2).unwrap_or_default();
    let earliest = now.saturating_duration_since(boot).saturating_add(half);
    let periods = earliest.as_nanos().checked_div(period.as_nanos());
    let periods = periods.and_then(|periods| u32::try_from(periods.checked_add(1)?).ok());
    let at = periods.and_then(|periods| boot.checked_add(period.checked_mul(periods)?));
    at.unwrap_or(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_ends_at_a_multiple_of_its_period_since_the_boot() {
        let boot = Instant::now();
        let after = |now, period| {
            let [now, period] = [now, period].map(Duration::from_millis);
            next(Some(boot), boot + now, period).duration_since(boot).as_millis()
        };
        let cases = [
            ("on the grid", 20_000, 10_000, 30_000),
            ("after short work", 20_400, 10_000, 30_000),
            ("after work of almost half a period", 24_999, 10_000, 30_000),
            ("after longer work", 25_000, 10_000, 40_000),
            ("between two points", 27_000, 10_000, 40_000),
            ("another period", 27_000, 5_000, 30_000),
            ("no period", 27_000, 0, 27_000),
        ];
        for (name, now, period, want) in cases {
            assert_eq!(after(now, period), want, "{name}");
        }
        let (now, period) = (boot + Duration::from_secs(7), Duration::from_secs(10));
        assert_eq!(next(None, now, period), now + period, "not aligned");
    }

    #[test]
    fn slots_begin_at_multiples_of_their_length_since_the_boot() {
        let boot = Instant::now();
        let ms = Duration::from_millis;
        for (at, slot, want) in
            [(1_001, 20, 1_020), (1_019, 20, 1_020), (1_020, 20, 1_020), (1_001, 0, 1_001)]
        {
            assert_eq!(
                slot_at(Some(boot), boot + ms(at), ms(slot)),
                boot + ms(want),
                "{at} in slots of {slot}"
            );
        }
        assert_eq!(slot_at(None, boot + ms(7), ms(20)), boot + ms(7), "not aligned");
    }

    #[tokio::test(start_paused = true)]
    async fn files_that_stay_are_checked_seldom_and_files_that_change_soon_again() {
        let mut checks = FileChecks::new(Duration::from_secs(5));
        for (age, wait) in [(0, 1), (54, 1), (63, 1), (64, 2), (159, 2), (160, 5), (1_000_000, 5)] {
            checks.reset();
            tokio::time::advance(Duration::from_secs(age)).await;
            assert_eq!(checks.wait(), Duration::from_secs(wait), "{age} s after the change");
        }
        checks.reset();
        let began = Instant::now();
        checks.pause().await;
        assert_eq!(began.elapsed(), Duration::from_secs(1));
    }

    #[tokio::test(start_paused = true)]
    async fn timers_of_a_process_that_does_not_align_them_are_exact() {
        let began = Instant::now();
        assert_eq!(first_tick(Duration::from_secs(2)), began);
        pause(Duration::from_secs(2)).await;
        assert_eq!(began.elapsed(), Duration::from_secs(2));
    }
}
