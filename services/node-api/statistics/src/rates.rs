//! CPU usage as a rate: the CPU time since the previous request.

use std::collections::{BTreeMap, HashMap, HashSet};

use jiff::Timestamp;
use parking_lot::Mutex;
use quintlet_cri_api::v1;

/// The CPU time of the previous request, to compute a rate.
#[derive(Debug, Default)]
pub(super) struct Rate(Mutex<Option<(Timestamp, u64)>>);

impl Rate {
    /// Returns the CPU usage since the previous request, in nanocores. None for the first request.
    pub(super) fn nano_cores(&self, time: Timestamp, cpu_nanos: u64) -> Option<u64> {
        let mut last = self.0.lock();
        let before = last.filter(|(at, _)| *at < time);
        // The rate over a very short time would be inaccurate.
        let is_due = before.is_none_or(|(at, _)| time.duration_since(at).as_secs_f64() >= 1.0);
        if is_due {
            *last = Some((time, cpu_nanos));
        }
        before.and_then(|(at, nanos)| {
            let seconds = time.duration_since(at).as_secs_f64();
            let used = cpu_nanos.saturating_sub(nanos);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
            (seconds > 0.0).then(|| (used as f64 / seconds) as u64)
        })
    }
}

/// The previous CPU time of everything for which the runtime reports no usage rate.
#[derive(Debug, Default)]
pub(super) struct Rates(pub(super) Mutex<HashMap<String, Rate>>);

impl Rates {
    /// Sets the usage rate of `cpu` if the runtime left it out.
    pub(super) fn complete(&self, key: &str, cpu: &mut v1::CpuUsage) {
        let Some(total) = cpu.usage_core_nano_seconds else { return };
        if cpu.usage_nano_cores.is_some() {
            return;
        }
        let time = Timestamp::from_nanosecond(i128::from(cpu.timestamp)).unwrap_or_default();
        let mut all = self.0.lock();
        let rate = all.entry(key.to_owned()).or_default().nano_cores(time, total.value);
        cpu.usage_nano_cores = rate.map(|value| v1::UInt64Value { value });
    }

    /// Removes entries of pods and containers that no longer exist.
    pub(super) fn keep(&self, there: &HashSet<String>) {
        self.0.lock().retain(|key, _| there.contains(key));
    }
}

/// Previous CPU times by system container.
#[derive(Debug, Default)]
pub(super) struct SystemRates(Mutex<BTreeMap<&'static str, Rate>>);

impl SystemRates {
    /// Returns the CPU usage of a system container since the previous request, in nanocores. None for the
    /// first request.
    pub(super) fn nano_cores(&self, name: &'static str, time: Timestamp, cpu_nanos: u64) -> Option<u64> {
        self.0.lock().entry(name).or_default().nano_cores(time, cpu_nanos)
    }
}
