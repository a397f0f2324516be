//! Crash-loop and image-pull back-off (`pkg/kubelet/kuberuntime: doBackOff`,
//! `pkg/kubelet/images: EnsureImageExists`).
//!
//! Back-offs belong to one pod and are recorded on disk, so they survive a restart of pod-sync. Times are
//! CLOCK_BOOTTIME; a record of another boot is dropped. The runtime reports exits in wall time.
//! [`CrashLoopBackoffs::finished_ago`] converts each exit once, so that setting the wall clock changes no
//! delay.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Container;
use quintlet_model::go_duration;
use quintlet_model::hash::fnv64_hex;
use quintlet_model::ids::{ContainerId, PodRef};
use quintlet_model::runtime::{Container as RuntimeContainer, ContainerState, PodRuntime};
use serde::{Deserialize, Serialize};

/// A container that ran this long since its last restart starts from the initial delay again. Independent of
/// `maxContainerRestartPeriod`, as in the kubelet.
pub const CRASH_LOOP_RESET: Duration = Duration::from_secs(600);

/// Bounds of a back-off. Each delay is twice the previous one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackoffDelays {
    /// Delay after the first failure.
    pub initial: Duration,
    /// Upper bound of the delay.
    pub max: Duration,
}

impl Default for BackoffDelays {
    fn default() -> Self {
        Self { initial: Duration::from_secs(10), max: Duration::from_secs(300) }
    }
}

impl BackoffDelays {
    fn after(self, previous: Option<Duration>) -> Duration {
        previous.map_or(self.initial, |d| d.saturating_mul(2)).min(self.max)
    }
}

/// Whether a start or a pull may happen now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackoffDecision {
    /// No back-off applies, or it has elapsed.
    Start,
    /// The attempt is delayed.
    BackOff {
        /// CLOCK_BOOTTIME at which the delay ends.
        until: Duration,
        /// Length of the whole delay, for messages.
        delay: Duration,
    },
}

/// Crash-loop state of one container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CrashLoopEntry {
    /// Delay after the next exit.
    pub delay: Duration,
    /// CLOCK_BOOTTIME of the restart that set `delay`.
    pub last_update: Duration,
    /// The newest exit, with its time by CLOCK_BOOTTIME.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<RecordedExit>,
    /// The exited instance whose restart is in progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restarting: Option<ContainerId>,
}

/// Exit of a container instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedExit {
    /// The instance that exited.
    pub id: ContainerId,
    /// CLOCK_BOOTTIME.
    pub at: Duration,
}

/// Crash-loop back-offs of the containers of one pod, by [`crash_loop_key`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CrashLoopBackoffs {
    entries: BTreeMap<String, CrashLoopEntry>,
}

impl CrashLoopBackoffs {
    /// Decides whether a container may restart whose newest instance finished `finished_ago` before `now`
    /// (CLOCK_BOOTTIME).
    #[must_use]
    pub fn decide(&self, key: &str, finished_ago: Duration, now: Duration) -> BackoffDecision {
        let Some(entry) = self.live(key, finished_ago, now) else { return BackoffDecision::Start };
        if finished_ago < entry.delay {
            let left = entry.delay.saturating_sub(finished_ago);
            BackoffDecision::BackOff { until: now.saturating_add(left), delay: entry.delay }
        } else {
            BackoffDecision::Start
        }
    }

    /// Records that the restart of an exited instance begins, whose back-off is over. Call it, and save the
    /// record, before the start. The restart is in progress until [`Self::end_restart`], and counts once,
    /// however often it is begun. Returns the delay that applies after the next exit.
    pub fn begin_restart(
        &mut self,
        key: &str,
        exited: &ContainerId,
        finished_ago: Duration,
        now: Duration,
        delays: BackoffDelays,
    ) -> Duration {
        if let Some(entry) = self.restarting(key, exited) {
            return entry.delay;
        }
        let delay = delays.after(self.live(key, finished_ago, now).map(|e| e.delay));
        let exit = self.entries.remove(key).and_then(|e| e.exit);
        let restarting = Some(exited.clone());
        self.entries.insert(key.to_owned(), CrashLoopEntry { delay, last_update: now, exit, restarting });
        delay
    }

    /// Returns whether the restart of this exited instance is in progress. It needs no other back-off.
    #[must_use]
    pub fn is_restarting(&self, key: &str, exited: &ContainerId) -> bool {
        self.restarting(key, exited).is_some()
    }

    /// Records that the restart in progress has succeeded or failed. The next one counts.
    pub fn end_restart(&mut self, key: &str) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.restarting = None;
        }
    }

    /// Returns how long before `now` (CLOCK_BOOTTIME) an instance finished. The wall clock is used for the
    /// first observation of an exit only. The result never precedes the last restart plus the time that the
    /// instance ran, so setting the wall clock forward does not shorten a back-off.
    pub fn finished_ago(
        &mut self,
        key: &str,
        exited: &RuntimeContainer,
        wall: jiff::Timestamp,
        now: Duration,
    ) -> Duration {
        let ago = finished_ago(exited, wall);
        let Some(entry) = self.entries.get_mut(key) else { return ago };
        let at = match &entry.exit {
            Some(exit) if exit.id == exited.id => exit.at,
            Some(_) | None => {
                let earliest = entry.last_update.saturating_add(ran_for(exited)).min(now);
                let at = now.saturating_sub(ago).max(earliest);
                entry.exit = Some(RecordedExit { id: exited.id.clone(), at });
                at
            }
        };
        now.saturating_sub(at)
    }

    /// Removes expired entries: those without an exit for [`CRASH_LOOP_RESET`] plus twice the longest delay.
    pub fn remove_expired(&mut self, now: Duration) {
        self.entries.retain(|_, e| now.saturating_sub(e.last_update) <= CRASH_LOOP_RESET.saturating_mul(2));
    }

    fn restarting(&self, key: &str, exited: &ContainerId) -> Option<&CrashLoopEntry> {
        self.entries.get(key).filter(|entry| entry.restarting.as_ref() == Some(exited))
    }

    fn live(&self, key: &str, finished_ago: Duration, now: Duration) -> Option<&CrashLoopEntry> {
        let finished = now.saturating_sub(finished_ago);
        self.entries.get(key).filter(|e| finished.saturating_sub(e.last_update) <= CRASH_LOOP_RESET)
    }
}

/// Returns the newest exited instance of a container, from whose exit its back-off counts.
#[must_use]
pub fn last_exit<'a>(runtime: &'a PodRuntime, name: &str) -> Option<&'a RuntimeContainer> {
    runtime.containers.iter().find(|c| c.name == name && c.state == ContainerState::Exited)
}

/// Returns how long before wall time `now` an instance finished; zero if that is in the future because a
/// clock was set.
#[must_use]
pub fn finished_ago(exited: &RuntimeContainer, now: jiff::Timestamp) -> Duration {
    let nanos = now.as_nanosecond().saturating_sub(i128::from(exited.finished_unix_ns));
    Duration::from_nanos(u64::try_from(nanos.max(0)).unwrap_or(u64::MAX))
}

/// Returns how long an instance ran, by the runtime's clock; zero if it never started or that clock went
/// back.
fn ran_for(exited: &RuntimeContainer) -> Duration {
    if exited.started_unix_ns == 0 {
        return Duration::ZERO;
    }
    let nanos = exited.finished_unix_ns.saturating_sub(exited.started_unix_ns);
    Duration::from_nanos(u64::try_from(nanos).unwrap_or_default())
}

/// Returns the key of a container's crash-loop entry. It covers image and resources, so changing them resets
/// the back-off.
#[must_use]
pub fn crash_loop_key(pod: &PodRef, container: &Container) -> String {
    let resources =
        container.resources.as_ref().and_then(|r| serde_json::to_string(r).ok()).unwrap_or_default();
    fnv64_hex(&format!(
        "{}/{}/{}/{}/{}/{resources}",
        pod.name,
        pod.namespace,
        pod.uid,
        container.name,
        container.image.as_deref().unwrap_or_default(),
    ))
}

/// Returns the message of waiting reason CrashLoopBackOff.
#[must_use]
pub fn crash_loop_message(delay: Duration, container: &str, pod: &PodRef) -> String {
    format!("back-off {} restarting failed container={container} pod={pod}", go_duration::format(delay))
}

/// Image-pull state of one image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImagePullEntry {
    /// Delay that began at `last_update`.
    pub delay: Duration,
    /// CLOCK_BOOTTIME of the failed pull that set `delay`.
    pub last_update: Duration,
    /// Waiting reason of the failed pull, for example `ErrImagePull`.
    pub error: String,
    /// Message of the failed pull.
    pub message: String,
}

/// Image-pull back-offs of one pod, by image.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ImagePullBackoffs {
    entries: BTreeMap<String, ImagePullEntry>,
}

impl ImagePullBackoffs {
    /// Decides whether `image` may be pulled at CLOCK_BOOTTIME `now`.
    #[must_use]
    pub fn decide(&self, image: &str, now: Duration, delays: BackoffDelays) -> BackoffDecision {
        match self.live(image, now, delays) {
            Some(e) => {
                let until = e.last_update.saturating_add(e.delay);
                if now < until {
                    BackoffDecision::BackOff { until, delay: e.delay }
                } else {
                    BackoffDecision::Start
                }
            }
            None => BackoffDecision::Start,
        }
    }

    /// Records a failed pull. A successful pull does not reset the entry; it expires.
    pub fn record_failure(
        &mut self,
        image: &str,
        now: Duration,
        delays: BackoffDelays,
        error: &str,
        message: &str,
    ) {
        let delay = delays.after(self.live(image, now, delays).map(|e| e.delay));
        self.entries.insert(
            image.to_owned(),
            ImagePullEntry { delay, last_update: now, error: error.to_owned(), message: message.to_owned() },
        );
    }

    /// Returns the message of waiting reason ImagePullBackOff, which includes the previous error.
    #[must_use]
    pub fn message(&self, image: &str) -> String {
        let head = format!("Back-off pulling image {image:?}");
        match self.entries.get(image) {
            Some(e) => format!("{head}: {}: {}", e.error, e.message),
            None => head,
        }
    }

    /// Removes expired entries.
    pub fn remove_expired(&mut self, now: Duration, delays: BackoffDelays) {
        self.entries.retain(|_, e| now.saturating_sub(e.last_update) <= delays.max.saturating_mul(2));
    }

    fn live(&self, image: &str, now: Duration, delays: BackoffDelays) -> Option<&ImagePullEntry> {
        self.entries.get(image).filter(|e| now.saturating_sub(e.last_update) <= delays.max.saturating_mul(2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_model::ids::PodUid;
    use serde_json::json;

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_stepped_wall_clock_changes_no_delay() {
        let start = jiff::Timestamp::from_second(1_000_000).unwrap();
        let wall = |seconds: i64| start + jiff::SignedDuration::from_secs(seconds);
        let hour = 3600;
        // The clock is set before the exit is first observed, or after it.
        for (first, then) in
            [(0, 0), (hour, hour), (-hour, -hour), (0, hour), (0, -hour), (hour, 0), (-hour, 0)]
        {
            let exited = exit_of("a", wall(1));
            let mut state = CrashLoopBackoffs::default();
            restart(&mut state, Duration::ZERO, s(1000), BackoffDelays::default());
            let ago = state.finished_ago("k", &exited, wall(1 + first), s(1001));
            assert!(ago <= s(1), "{first}: {ago:?}");
            assert!(
                matches!(state.decide("k", ago, s(1001)), BackoffDecision::BackOff { until, .. } if until <= s(1011))
            );
            let ago = state.finished_ago("k", &exited, wall(6 + then), s(1006));
            assert!(ago >= s(5) && ago <= s(6), "{first} {then}: {ago:?}");
            let ago = state.finished_ago("k", &exited, wall(11 + then), s(1011));
            assert_eq!(state.decide("k", ago, s(1011)), BackoffDecision::Start, "{first} {then}");
            assert_eq!(restart(&mut state, ago, s(1011), BackoffDelays::default()), s(20), "{first} {then}");
            // An instance that was not restarted keeps its finish time.
            assert!(state.finished_ago("k", &exited, wall(12 + then), s(1012)) >= s(11));
            let next = exit_of("b", wall(13 + then));
            assert_eq!(state.finished_ago("k", &next, wall(14 + then), s(1014)), s(1));
        }
        let exited = exit_of("a", wall(1));
        assert_eq!(
            CrashLoopBackoffs::default().finished_ago("k", &exited, wall(3), s(9)),
            s(2),
            "nothing to note it in"
        );
    }

    #[test]
    fn a_clock_that_is_set_forward_does_not_shorten_a_back_off() {
        let start = jiff::Timestamp::from_second(1_000_000).unwrap();
        let at = |seconds: i64| start + jiff::SignedDuration::from_secs(seconds);
        // The instance ran for 4 s by the runtime's clock, which is an hour behind pod-sync's clock when the
        // exit is observed.
        let nanos = |seconds: i64| i64::try_from(at(seconds).as_nanosecond()).unwrap();
        let rows = [
            ("ran for 4 s", nanos(0), s(1)),
            ("ended at once", nanos(4), s(5)),
            ("ran for longer than the time since the restart", nanos(-3600), s(0)),
            ("ended before it started", nanos(3600), s(5)),
            ("never started", 0, s(5)),
        ];
        for (row, started_unix_ns, expected) in rows {
            let mut state = CrashLoopBackoffs::default();
            restart(&mut state, Duration::ZERO, s(1000), BackoffDelays::default());
            let exited = RuntimeContainer { started_unix_ns, ..exit_of("a", at(4)) };
            assert_eq!(state.finished_ago("k", &exited, at(3605), s(1005)), expected, "{row}");
        }
    }

    // Counts a whole restart.
    fn restart(
        state: &mut CrashLoopBackoffs,
        finished_ago: Duration,
        now: Duration,
        delays: BackoffDelays,
    ) -> Duration {
        let delay =
            state.begin_restart("k", &ContainerId::parse("exited").unwrap(), finished_ago, now, delays);
        state.end_restart("k");
        delay
    }

    fn exit_of(id: &str, at: jiff::Timestamp) -> RuntimeContainer {
        let runtime = quintlet_testkit::pods::RuntimeBuilder::ready().exited("c", 1).build();
        let finished_unix_ns = i64::try_from(at.as_nanosecond()).unwrap();
        let id = quintlet_testkit::pods::id(id);
        RuntimeContainer {
            id,
            started_unix_ns: finished_unix_ns,
            finished_unix_ns,
            ..runtime.containers[0].clone()
        }
    }

    #[test]
    fn restarts_come_at_once_then_after_10_20_40_80_160_300_300_seconds() {
        let mut state = CrashLoopBackoffs::default();
        let mut now = s(1000);
        let mut waited = Vec::new();
        for _ in 0..8 {
            // It exits one second after its start.
            now += s(1);
            let turn = state.decide("k", Duration::ZERO, now);
            let wait = match turn {
                BackoffDecision::Start => Duration::ZERO,
                BackoffDecision::BackOff { until, delay } => {
                    assert_eq!(until, now + delay);
                    delay
                }
            };
            waited.push(wait.as_secs());
            now += wait;
            assert_eq!(state.decide("k", wait, now), BackoffDecision::Start);
            restart(&mut state, wait, now, BackoffDelays::default());
        }
        assert_eq!(waited, [0, 10, 20, 40, 80, 160, 300, 300]);
    }

    #[test]
    fn the_delay_is_measured_from_the_finish() {
        let mut state = CrashLoopBackoffs::default();
        restart(&mut state, s(0), s(100), BackoffDelays::default());
        assert_eq!(state.decide("k", s(3), s(200)), BackoffDecision::BackOff { until: s(207), delay: s(10) });
        assert_eq!(state.decide("k", s(10), s(200)), BackoffDecision::Start);
    }

    #[test]
    fn more_than_ten_minutes_between_restart_and_exit_start_over() {
        let mut state = CrashLoopBackoffs::default();
        for now in [s(100), s(120), s(160)] {
            restart(&mut state, s(0), now, BackoffDelays::default());
        }
        assert_eq!(state.entries["k"].delay, s(40));
        // It ran for exactly 600 s, which does not reset the delay.
        assert!(matches!(state.decide("k", s(0), s(760)), BackoffDecision::BackOff { .. }));
        assert_eq!(state.decide("k", s(0), s(761)), BackoffDecision::Start);
        assert_eq!(restart(&mut state, s(0), s(761), BackoffDelays::default()), s(10));
    }

    #[test]
    fn back_off_entries_are_kept_until_they_expire() {
        let d = BackoffDelays::default();
        let (mut crashes, mut pulls) = (CrashLoopBackoffs::default(), ImagePullBackoffs::default());
        restart(&mut crashes, s(0), s(100), d);
        pulls.record_failure("i", s(100), d, "ErrImagePull", "no");
        // It ran for 600 s, and its restart waits for 300 s more.
        crashes.remove_expired(s(1000));
        assert!(matches!(crashes.decide("k", s(9), s(700)), BackoffDecision::BackOff { .. }));
        pulls.remove_expired(s(700), d);
        assert_ne!(pulls, ImagePullBackoffs::default());
        crashes.remove_expired(s(1301));
        pulls.remove_expired(s(701), d);
        assert_eq!((crashes, pulls), (CrashLoopBackoffs::default(), ImagePullBackoffs::default()));
    }

    #[test]
    fn a_short_maximum_caps_the_first_delay_too() {
        let delays = BackoffDelays { initial: s(10), max: s(15) };
        let mut state = CrashLoopBackoffs::default();
        assert_eq!(restart(&mut state, s(0), s(1), delays), s(10));
        assert_eq!(restart(&mut state, s(0), s(2), delays), s(15));
    }

    #[test]
    fn saved_back_offs_are_restored_unchanged() {
        let mut state = CrashLoopBackoffs::default();
        restart(&mut state, s(0), s(100), BackoffDelays::default());
        let text = serde_json::to_string(&state).unwrap();
        assert_eq!(serde_json::from_str::<CrashLoopBackoffs>(&text).unwrap(), state);
        let mut pulls = ImagePullBackoffs::default();
        pulls.record_failure("i", s(1), BackoffDelays::default(), "ErrImagePull", "no");
        let text = serde_json::to_string(&pulls).unwrap();
        assert_eq!(serde_json::from_str::<ImagePullBackoffs>(&text).unwrap(), pulls);
    }

    #[test]
    fn a_pull_backs_off_after_failures_and_remembers_the_last_error() {
        let d = BackoffDelays::default();
        let mut pulls = ImagePullBackoffs::default();
        assert_eq!(pulls.decide("i", s(0), d), BackoffDecision::Start);
        assert_eq!(pulls.message("i"), "Back-off pulling image \"i\"");
        pulls.record_failure("i", s(100), d, "ErrImagePull", "no such host");
        assert_eq!(pulls.decide("i", s(105), d), BackoffDecision::BackOff { until: s(110), delay: s(10) });
        assert_eq!(pulls.decide("i", s(110), d), BackoffDecision::Start);
        assert_eq!(pulls.message("i"), "Back-off pulling image \"i\": ErrImagePull: no such host");
        pulls.record_failure("i", s(110), d, "ErrImagePull", "no such host");
        assert_eq!(pulls.decide("i", s(111), d), BackoffDecision::BackOff { until: s(130), delay: s(20) });
        // Idle for longer than twice the maximum: starts over.
        pulls.record_failure("i", s(110 + 601), d, "ErrImagePull", "x");
        assert_eq!(pulls.decide("i", s(711), d), BackoffDecision::BackOff { until: s(721), delay: s(10) });
    }

    #[test]
    fn the_key_changes_with_image_and_resources_and_with_nothing_else() {
        let pod = PodRef { uid: PodUid::parse("u").unwrap(), namespace: "n".into(), name: "p".into() };
        let key = |c: serde_json::Value| crash_loop_key(&pod, &serde_json::from_value(c).unwrap());
        let base = key(json!({"name": "c", "image": "i"}));
        assert_eq!(base, key(json!({"name": "c", "image": "i", "command": ["x"]})));
        assert_ne!(base, key(json!({"name": "c", "image": "j"})));
        assert_ne!(base, key(json!({"name": "c", "image": "i", "resources": {"limits": {"cpu": "1"}}})));
    }

    #[test]
    fn a_restart_in_progress_counts_once_and_until_it_ends() {
        let [first, second] = ["first", "second"].map(|id| ContainerId::parse(id).unwrap());
        let d = BackoffDelays::default();
        let mut state = CrashLoopBackoffs::default();
        assert!(!state.is_restarting("k", &first));
        assert_eq!(state.begin_restart("k", &first, s(0), s(100), d), s(10));
        // Another process repeats it.
        let mut state: CrashLoopBackoffs =
            serde_json::from_str(&serde_json::to_string(&state).unwrap()).unwrap();
        assert!(state.is_restarting("k", &first));
        assert!(!state.is_restarting("k", &second));
        assert_eq!(state.begin_restart("k", &first, s(3), s(103), d), s(10), "counts once");
        assert_eq!(state.begin_restart("k", &second, s(0), s(120), d), s(20), "another exit counts");
        state.end_restart("k");
        assert!(!state.is_restarting("k", &second));
        assert_eq!(
            state.begin_restart("k", &second, s(20), s(140), d),
            s(40),
            "so does a start after one that failed"
        );
    }

    #[test]
    fn the_message_of_a_crash_loop_has_the_delay_as_go_writes_it() {
        let pod = PodRef { uid: PodUid::parse("u").unwrap(), namespace: "n".into(), name: "p".into() };
        assert_eq!(
            crash_loop_message(s(80), "main", &pod),
            "back-off 1m20s restarting failed container=main pod=p_n(u)"
        );
    }
}
