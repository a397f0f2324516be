//! Startup latency of a new node (pkg/kubelet/util/node_startup_latency_tracker.go). A node that was
//! registered before is not measured.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use quintlet_telemetry::metrics::float_gauge;

/// Steps of a start, each as the time since the machine's.
#[derive(Debug)]
pub struct Startup {
    began: Duration,
    times: Mutex<Times>,
}

#[derive(Debug, Default)]
struct Times {
    attempted: Option<Duration>,
    registered: Option<Duration>,
    is_ready: bool,
}

impl Startup {
    /// Returns the metrics of a process that started at `began`.
    #[must_use]
    pub fn new(began: Duration) -> Self {
        Self { began, times: Mutex::default() }
    }

    /// Records that the Node is about to be made.
    pub fn attempt(&self, now: Duration) {
        self.times.lock().attempted.get_or_insert(now);
    }

    /// Records that the Node was created.
    pub fn registered(&self, now: Duration) {
        let mut times = self.times.lock();
        let (Some(attempted), None) = (times.attempted, times.registered) else { return };
        times.registered = Some(now);
        set(
            "kubelet_node_startup_pre_kubelet_duration_seconds",
            "Duration in seconds of node startup before kubelet starts",
            self.began,
        );
        set(
            "kubelet_node_startup_pre_registration_duration_seconds",
            "Duration in seconds of node startup before registration",
            attempted.saturating_sub(self.began),
        );
        set(
            "kubelet_node_startup_registration_duration_seconds",
            "Duration in seconds of node startup during registration",
            now.saturating_sub(attempted),
        );
    }

    /// Records that the API server has the Node as ready.
    pub fn ready(&self, now: Duration) {
        let mut times = self.times.lock();
        let (Some(registered), false) = (times.registered, times.is_ready) else { return };
        times.is_ready = true;
        set(
            "kubelet_node_startup_post_registration_duration_seconds",
            "Duration in seconds of node startup after registration",
            now.saturating_sub(registered),
        );
        set("kubelet_node_startup_duration_seconds", "Duration in seconds of node startup in total", now);
    }
}

fn set(name: &'static str, help: &'static str, took: Duration) {
    let gauge: Gauge<f64, AtomicU64> = float_gauge(name, help);
    gauge.set(took.as_secs_f64());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events() -> Vec<String> {
        let text = quintlet_telemetry::metrics::text();
        text.lines()
            .filter_map(|l| l.strip_prefix("kubelet_node_startup_"))
            .map(|l| l.replace("duration_seconds ", ""))
            .collect()
    }

    #[test]
    fn each_startup_step_of_a_new_node_is_an_event_and_a_known_node_has_none() {
        let at = Duration::from_secs;
        let known = Startup::new(at(100));
        known.attempt(at(101));
        known.ready(at(102));
        assert_eq!(events(), [""; 0], "the Node existed before");
        let new = Startup::new(at(100));
        for now in [103, 104] {
            new.attempt(at(now));
        }
        for now in [107, 108] {
            new.registered(at(now));
        }
        assert_eq!(events(), ["pre_kubelet_100.0", "pre_registration_3.0", "registration_4.0"]);
        for now in [112, 113] {
            new.ready(at(now));
        }
        let all = [
            "pre_kubelet_100.0",
            "pre_registration_3.0",
            "registration_4.0",
            "post_registration_5.0",
            "112.0",
        ];
        assert_eq!(events(), all);
    }
}
