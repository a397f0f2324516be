//! Metrics of the cache.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use quintlet_telemetry::metrics::{counter, gauge};

use crate::store::StoreCounts;

#[derive(Debug)]
pub(crate) struct Metrics {
    pub(crate) pods: Gauge,
    pub(crate) bytes: Gauge,
    pub(crate) started: Gauge,
    pub(crate) writes: Counter,
    pub(crate) failures: Counter,
    pub(crate) left_out: Gauge,
    pub(crate) unusable: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            pods: gauge("quintlet_offline_cache_pods", "Pods in the offline cache"),
            bytes: gauge("quintlet_offline_cache_bytes", "Size of the files of the offline cache"),
            started: gauge(
                "quintlet_offline_started_pods",
                "Pods that were started from the offline cache and that the API server has not confirmed",
            ),
            writes: counter("quintlet_offline_cache_writes", "Files of the offline cache that were written"),
            failures: counter(
                "quintlet_offline_cache_write_failures",
                "Files of the offline cache that could not be written",
            ),
            left_out: gauge(
                "quintlet_offline_cache_left_out_files",
                "Files that the offline cache lacks because of its limits of size",
            ),
            unusable: gauge(
                "quintlet_offline_cache_unusable_files",
                "Files of the offline cache that could not be used at the start",
            ),
        }
    }
}

impl Metrics {
    pub(crate) fn set_store(&self, counts: StoreCounts) {
        let number = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        self.bytes.set(i64::try_from(counts.bytes).unwrap_or(i64::MAX));
        self.left_out.set(number(counts.left_out));
        self.unusable.set(number(counts.unusable));
    }
}
