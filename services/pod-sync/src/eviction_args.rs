//! Flags of evictions.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use clap::ArgAction;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use pod_sync_decisions::qos::ResourceList;
use pod_sync_eviction::layout::Layout;
use pod_sync_eviction::manager::EvictionSettings;
use pod_sync_eviction::thresholds::{self, ThresholdConfig, ThresholdError};
use quintlet_model::go_duration;

/// When the node evicts pods.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Evictions")]
pub struct EvictionArgs {
    /// Pods are evicted while less than this is available: `memory.available=100Mi` or
    /// `memory.available<100Mi`, an amount or a percentage of the capacity. 0% switches a signal off. Memory
    /// and disk space below the thresholds are not allocatable.
    #[arg(
        long,
        value_delimiter = ',',
        value_parser = threshold,
        value_name = "THRESHOLD",
        default_values = [
            "memory.available=100Mi", "nodefs.available=10%", "nodefs.inodesFree=5%", "imagefs.available=15%",
            "imagefs.inodesFree=5%",
        ]
    )]
    pub eviction_hard: Vec<(String, String)>,
    /// Pods are evicted after less than this was available for the grace period of the signal.
    #[arg(long, value_delimiter = ',', value_parser = threshold, value_name = "THRESHOLD")]
    pub eviction_soft: Vec<(String, String)>,
    /// Grace periods of --eviction-soft, `memory.available=1m30s`.
    #[arg(long, value_delimiter = ',', value_parser = quintlet_config::pair, value_name = "DURATION")]
    pub eviction_soft_grace_period: Vec<(String, String)>,
    /// Amount above the threshold that must be available before evictions end, `memory.available=500Mi`.
    #[arg(long, value_delimiter = ',', value_parser = quintlet_config::pair, value_name = "AMOUNT")]
    pub eviction_minimum_reclaim: Vec<(String, String)>,
    /// How long a pressure condition stays true after its threshold was last crossed.
    #[arg(long, default_value = "5m", value_parser = duration, value_name = "DURATION")]
    pub eviction_pressure_transition_period: Duration,
    /// Longest grace period of a pod that is evicted for a soft threshold, in seconds.
    #[arg(long, default_value_t = 0, allow_negative_numbers = true, value_name = "SECONDS")]
    pub eviction_max_pod_grace_period: i32,
    /// Measure memory at once when the kernel reports that its usage crosses a threshold. Cgroup v1; with v2
    /// only when all pods together reach their limit.
    #[arg(long, default_value_t = false, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub kernel_memcg_notification: bool,
    /// Signals that --eviction-hard does not name keep their default.
    #[arg(long, default_value_t = false, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub merge_default_eviction_settings: bool,
    /// Evict pods that exceed their own limits of local storage.
    #[arg(long, default_value_t = true, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub local_storage_capacity_isolation: bool,
}

impl EvictionArgs {
    /// Returns the amounts that hard eviction keeps free, by resource.
    ///
    /// # Errors
    /// A threshold cannot be used.
    pub(crate) fn reservations(
        &self,
        capacity: &BTreeMap<String, Quantity>,
    ) -> Result<ResourceList, ThresholdError> {
        let hard = thresholds::parse(&ThresholdConfig {
            hard: Some(&self.eviction_hard),
            merge_defaults: self.merge_default_eviction_settings,
            ..ThresholdConfig::default()
        })?;
        Ok(thresholds::hard_reservations(&hard, capacity))
    }

    /// Returns the settings, or `None` if nothing is ever evicted. `enforces_pods`: the memory of all pods
    /// together has a limit. The layout is that of one file system.
    ///
    /// # Errors
    /// A threshold cannot be used.
    pub(crate) fn settings(&self, enforces_pods: bool) -> anyhow::Result<Option<EvictionSettings>> {
        let grace = |(signal, text): &(String, String)| {
            let period = duration(text).with_context(|| format!("grace period of {signal}"))?;
            anyhow::Ok((signal.clone(), period))
        };
        let soft_grace = self.eviction_soft_grace_period.iter().map(grace).collect::<Result<Vec<_>, _>>()?;
        let thresholds = thresholds::parse(&ThresholdConfig {
            hard: Some(&self.eviction_hard),
            soft: &self.eviction_soft,
            soft_grace: &soft_grace,
            minimum_reclaim: &self.eviction_minimum_reclaim,
            merge_defaults: self.merge_default_eviction_settings,
            enforces_pods,
        })?;
        if thresholds.is_empty() && !self.local_storage_capacity_isolation {
            return Ok(None);
        }
        Ok(Some(EvictionSettings {
            thresholds,
            layout: Layout::Single,
            transition: self.eviction_pressure_transition_period,
            max_grace: i64::from(self.eviction_max_pod_grace_period),
            enforces_limits: self.local_storage_capacity_isolation,
            skips_memory_volumes: false,
        }))
    }
}

fn duration(text: &str) -> anyhow::Result<Duration> {
    let nanos = go_duration::parse(text)?;
    Ok(Duration::from_nanos(u64::try_from(nanos).context("a duration must not be negative")?))
}

fn threshold(text: &str) -> Result<(String, String), String> {
    let (signal, value) = text.split_once(['=', '<']).ok_or("want signal<value")?;
    if signal.is_empty() {
        Err("want signal<value".to_owned())
    } else {
        Ok((signal.to_owned(), value.to_owned()))
    }
}
