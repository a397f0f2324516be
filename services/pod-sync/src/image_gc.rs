//! Removes unused images by age and by disk usage (`pkg/kubelet/images: GarbageCollect`).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pod_sync_clients::{CallError, EventType};
use pod_sync_metrics::ImageRemoval;
use pod_sync_node_decisions::image_gc::{
    FsCapacity, Image, ImageGcPolicy, ImageUsage, bytes_to_free, usage_percent,
};
use pod_sync_node_decisions::image_name;
use quintlet_kit::clock::Clock;
use quintlet_kit::task::blocking;
use quintlet_model::pod as pods;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use pod_sync_worker::context::{ImagePulls, NodeConfig, Reporting, RuntimeAccess, WorkerContext};

/// Interval of tries before the first answer of the runtime, and the shortest interval of passes.
const FIRST: Duration = Duration::from_secs(5);
/// Longest measurement of a file system.
const MEASURE_TIMEOUT: Duration = Duration::from_secs(20);

/// The groups that image garbage collection uses.
#[derive(Clone)]
pub(crate) struct ImageGcContext {
    /// Wall clock, which tests replace.
    pub clock: Clock,
    /// Settings of this node.
    pub node: Arc<NodeConfig>,
    /// Access to the container runtime.
    pub runtime: RuntimeAccess,
    /// Statuses, events, views and metrics.
    pub reporting: Arc<Reporting>,
    /// Records of the pulls of images, which are removed with them.
    pub images: Arc<ImagePulls>,
    /// Thresholds and ages.
    pub policy: ImageGcPolicy,
    /// Use of the node's images over time.
    usage: Arc<Mutex<ImageUsage>>,
    /// Held by the measurement of a file system, also by one that hangs.
    measuring: Arc<Semaphore>,
}

impl ImageGcContext {
    pub(crate) fn new(ctx: &WorkerContext, policy: ImageGcPolicy) -> Self {
        Self {
            clock: ctx.clock.clone(),
            node: Arc::clone(&ctx.node),
            runtime: ctx.runtime.clone(),
            reporting: Arc::clone(&ctx.reporting),
            images: Arc::clone(&ctx.images),
            policy,
            usage: Arc::default(),
            measuring: Arc::new(Semaphore::new(1)),
        }
    }
}

/// Collects unused images until `stop`.
pub(crate) async fn run(ctx: ImageGcContext, stop: CancellationToken) {
    let policy = ctx.policy;
    let mut failures = 0_u32;
    let mut wait = FIRST;
    if policy.is_disabled() {
        return;
    }
    loop {
        // Both branches only wait.
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
        }
        wait = policy.period(FIRST);
        match pass(&ctx).await {
            Ok(()) => failures = 0,
            Err(Failure::Unavailable(why)) => {
                tracing::debug!(why, "failed to list images");
                wait = FIRST;
            }
            Err(Failure::Failed(why)) => {
                failures = u32::saturating_add(failures, 1);
                tracing::warn!(why, "image garbage collection failed");
                // A single failure may be caused by late statistics.
                if failures > 1 {
                    ctx.reporting.events.node(
                        &ctx.node.settings.node_name,
                        EventType::Warning,
                        "ImageGCFailed",
                        &why,
                    );
                }
            }
        }
    }
}

enum Failure {
    // The runtime could not be asked.
    Unavailable(String),
    Failed(String),
}

impl From<CallError> for Failure {
    fn from(e: CallError) -> Self {
        if e.is_refused_by_runtime() { Self::Failed(e.to_string()) } else { Self::Unavailable(e.to_string()) }
    }
}

/// Removes all images that no container uses, except pinned ones and those that were first seen within
/// `imageMinimumGCAge` (`pkg/kubelet/images: DeleteUnusedImages`).
pub(crate) async fn remove_unused(ctx: &ImageGcContext) {
    match try_to_remove_unused(ctx).await {
        Ok((images, bytes)) => tracing::info!(images, bytes, "removed unused images"),
        Err(Failure::Unavailable(error) | Failure::Failed(error)) => {
            tracing::warn!(error, "failed to remove unused images");
        }
    }
}

async fn try_to_remove_unused(ctx: &ImageGcContext) -> Result<(usize, u64), Failure> {
    let began = ctx.clock.boot();
    let in_use = in_use(ctx).await?;
    let listed = ctx.runtime.calls.images().await?;
    let now = ctx.clock.boot();
    let unused: Vec<Image> = {
        let mut usage = ctx.usage.lock();
        usage.observe(&listed, &in_use, now);
        usage.least_recently_used(&listed, &in_use, ctx.policy, now).into_iter().cloned().collect()
    };
    let mut there: BTreeSet<String> = listed.iter().map(|i| i.id.clone()).collect();
    let (mut removed, mut bytes) = (0_usize, 0_u64);
    for image in unused {
        match remove(ctx, &image, ImageRemoval::Space).await {
            Ok(()) => {
                there.remove(&image.id);
                removed = removed.saturating_add(1);
                bytes = bytes.saturating_add(image.size);
            }
            Err(Failure::Failed(error)) => tracing::info!(image = image.id, error, "failed to remove image"),
            Err(unavailable @ Failure::Unavailable(_)) => return Err(unavailable),
        }
    }
    prune(ctx, there, began).await;
    Ok((removed, bytes))
}

async fn pass(ctx: &ImageGcContext) -> Result<(), Failure> {
    let policy = ctx.policy;
    // Read before the list, so that an image used from now on counts as new, and is too young to be removed.
    let began = ctx.clock.boot();
    let in_use = in_use(ctx).await?;
    let mut listed = ctx.runtime.calls.images().await?;
    let now = ctx.clock.boot();
    // A snapshot, since eviction may look at the images meanwhile.
    let images = {
        let mut usage = ctx.usage.lock();
        usage.observe(&listed, &in_use, now);
        usage.clone()
    };
    let (mut gone, mut refused) = (BTreeSet::new(), Vec::new());
    for image in images.unused_for_max_age(&listed, &in_use, policy, now) {
        match remove(ctx, image, ImageRemoval::Age).await {
            Ok(()) => {
                gone.insert(image.id.clone());
            }
            // The other images are still removed.
            Err(Failure::Failed(why)) => refused.push(why),
            Err(unavailable @ Failure::Unavailable(_)) => return Err(unavailable),
        }
    }
    listed.retain(|i| !gone.contains(&i.id));
    let mut there: BTreeSet<String> = listed.iter().map(|i| i.id.clone()).collect();
    for mountpoint in ctx.runtime.calls.mount_points().await?.images {
        let disk = capacity(ctx, &mountpoint).await?;
        let Some(wanted) = bytes_to_free(disk, policy) else { continue };
        tracing::info!(
            mountpoint,
            usage = usage_percent(disk),
            wanted,
            "image file system is above the high threshold"
        );
        let unused = images.least_recently_used(&listed, &in_use, policy, now);
        let freed = free(ctx, unused, wanted, &mut there).await?;
        if freed < wanted {
            prune(ctx, there, began).await;
            return Err(Failure::Failed(report_insufficient_space(ctx, disk, freed)));
        }
    }
    prune(ctx, there, began).await;
    if refused.is_empty() { Ok(()) } else { Err(Failure::Failed(refused.join("; "))) }
}

/// Removes the pull records of images that no longer exist.
async fn prune(ctx: &ImageGcContext, existing: BTreeSet<String>, since: Duration) {
    let records = ctx.images.pull_records.clone();
    blocking(move || records.prune(&existing, since)).await;
}

/// Measures a file system, which may hang: on a blocking thread, and not again while one hangs.
async fn capacity(ctx: &ImageGcContext, mountpoint: &str) -> Result<FsCapacity, Failure> {
    let hangs = || Failure::Failed(format!("{mountpoint}: the file system does not answer"));
    let permit = Arc::clone(&ctx.measuring).try_acquire_owned().map_err(|_| hangs())?;
    let path = mountpoint.to_owned();
    let measured = blocking(move || {
        let measured = nix::sys::statvfs::statvfs(path.as_str());
        drop(permit);
        measured
    });
    let measured = tokio::time::timeout(MEASURE_TIMEOUT, measured).await.map_err(|_| hangs())?;
    let disk = measured
        .map(|s| FsCapacity {
            capacity: s.blocks().saturating_mul(s.fragment_size()),
            available: s.blocks_available().saturating_mul(s.fragment_size()),
        })
        .map_err(|e| Failure::Failed(format!("{mountpoint}: {e}")))?;
    if disk.capacity == 0 {
        let text = format!("invalid capacity 0 on image filesystem {mountpoint}");
        ctx.reporting.events.node(
            &ctx.node.settings.node_name,
            EventType::Warning,
            "InvalidDiskCapacity",
            &text,
        );
        return Err(Failure::Failed(text));
    }
    Ok(disk)
}

/// Removes images in this order until their sizes reach `wanted` bytes. Returns the sum of their sizes. Drops
/// the removed images from `existing`.
async fn free(
    ctx: &ImageGcContext,
    unused: Vec<&Image>,
    wanted: u64,
    existing: &mut BTreeSet<String>,
) -> Result<u64, Failure> {
    let mut freed = 0;
    for image in unused {
        if freed >= wanted {
            break;
        }
        match remove(ctx, image, ImageRemoval::Space).await {
            Ok(()) => {
                freed = u64::saturating_add(freed, image.size);
                existing.remove(&image.id);
            }
            Err(Failure::Failed(why)) => tracing::info!(image = image.id, why, "failed to remove image"),
            Err(unavailable @ Failure::Unavailable(_)) => return Err(unavailable),
        }
    }
    Ok(freed)
}

fn report_insufficient_space(ctx: &ImageGcContext, disk: FsCapacity, freed: u64) -> String {
    let text = format!(
        "Insufficient free disk space on the node's image filesystem ({}% of {} used). Failed to free sufficient space by deleting unused images (freed {freed} bytes). Investigate disk usage, as it could be used by active images, logs, volumes, or other data.",
        usage_percent(disk),
        human(disk.capacity),
    );
    ctx.reporting.events.node(&ctx.node.settings.node_name, EventType::Warning, "FreeDiskSpaceFailed", &text);
    text
}

/// Resolves the pull intents of an earlier run, as soon as the runtime lists its images.
pub(crate) async fn recover_pulls(ctx: ImageGcContext, stop: CancellationToken) {
    while ctx.images.pull_records.has_stale_intents() {
        match ctx.runtime.calls.images().await {
            Ok(images) => {
                let records = ctx.images.pull_records.clone();
                return blocking(move || records.recover(&images)).await;
            }
            Err(error) => tracing::debug!(%error, "failed to list images"),
        }
        // Both branches only wait.
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(FIRST) => {}
        }
    }
}

async fn remove(ctx: &ImageGcContext, image: &Image, cause: ImageRemoval) -> Result<(), Failure> {
    tracing::info!(image = image.id, names = ?image.names, bytes = image.size, ?cause, "removing image");
    ctx.runtime.calls.remove_image(&image.id).await?;
    ctx.reporting.metrics.operations.image_removed(cause);
    Ok(())
}

/// Returns IDs and names of the images in use by containers (running or dead), image volumes and sandboxes.
async fn in_use(ctx: &ImageGcContext) -> Result<BTreeSet<String>, Failure> {
    let all = ctx
        .runtime
        .pleg
        .all()
        .ok_or_else(|| Failure::Unavailable("runtime state has not been inspected yet".to_owned()))?;
    let containers = all.iter().flat_map(|p| &p.containers);
    let mut out: BTreeSet<String> = containers
        .flat_map(|c| [&c.image, &c.image_ref, &c.image_id])
        .filter(|n| !n.is_empty())
        .cloned()
        .collect();
    for view in ctx.reporting.views.all() {
        let volumes = pods::spec(&view.pod).volumes.iter().flatten();
        let references = volumes.filter_map(|v| v.image.as_ref()?.reference.as_deref());
        out.extend(references.map(image_name::full_name));
    }
    out.extend(ctx.runtime.calls.sandbox_image().await?.iter().map(|name| image_name::full_name(name)));
    Ok(out)
}

/// Formats a size with a unit of powers of 1024 (`pkg/kubelet/images: formatSize`): `37.1 GiB`.
fn human(bytes: u64) -> String {
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    #[expect(clippy::cast_precision_loss, reason = "one decimal is shown")]
    let mut size = bytes as f64 / 1024.0;
    let mut unit = "KiB";
    for larger in ["MiB", "GiB", "TiB"] {
        if size < 1024.0 {
            break;
        }
        size /= 1024.0;
        unit = larger;
    }
    format!("{size:.1} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_the_kubelets() {
        for (bytes, want) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1024 * 1024 - 1, "1024.0 KiB"),
            (1 << 20, "1.0 MiB"),
            (37_054_000_000, "34.5 GiB"),
            (5 << 50, "5120.0 TiB"),
        ] {
            assert_eq!(human(bytes), want);
        }
    }
}
