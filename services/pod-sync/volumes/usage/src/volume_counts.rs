//! Gauges of desired and actual volumes (pkg/kubelet/volumemanager/metrics).

use std::collections::BTreeMap;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use quintlet_telemetry::metrics::gauge_family;
use tokio_util::sync::CancellationToken;

/// Interval between counts.
const PERIOD: Duration = Duration::from_secs(10);

/// Labels of the gauge: plugin, and whether the volumes are desired or mounted.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VolumesLabel {
    plugin_name: String,
    state: &'static str,
}

/// Sets the gauges of desired and actual volumes periodically, until `stop`. `count` returns the numbers of
/// both.
pub async fn run(count: impl Fn() -> (Counts, Counts) + Send, stop: CancellationToken) {
    let gauges: Family<VolumesLabel, Gauge> =
        gauge_family("volume_manager_total_volumes", "Number of volumes in Volume Manager");
    let (mut desired, mut actual) = (BTreeMap::new(), BTreeMap::new());
    loop {
        let (wanted, there) = count();
        for (state, counts, now) in
            [("desired_state_of_world", &mut desired, wanted), ("actual_state_of_world", &mut actual, there)]
        {
            // A plugin without volumes is 0, not its last count.
            counts.values_mut().for_each(|count| *count = 0);
            counts.extend(now);
            set(&gauges, state, counts);
        }
        // Each branch only waits.
        tokio::select! {
            () = stop.cancelled() => return,
            () = quintlet_kit::timers::pause(PERIOD) => {}
        }
    }
}

/// Numbers of volumes by plugin.
type Counts = BTreeMap<String, i64>;

fn set(gauges: &Family<VolumesLabel, Gauge>, state: &'static str, counts: &Counts) {
    for (plugin_name, count) in counts {
        gauges.get_or_create(&VolumesLabel { plugin_name: plugin_name.clone(), state }).set(*count);
    }
}
