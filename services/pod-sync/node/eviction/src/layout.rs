//! File systems of a node, and what pods and the node have on each.

use crate::signal::{Resource, Signal};

/// Sharing of the file systems.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// One file system has the root directory, images and writable layers.
    Single,
    /// Images and writable layers share a file system of their own.
    SeparateImages,
    /// Images have a file system of their own. Writable layers are on the one of the root directory.
    Split,
}

/// Files of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Files {
    /// Writable layers of its containers.
    WritableLayers,
    /// Logs of its containers.
    Logs,
    /// Volumes of the pod on the node's disk.
    LocalVolumes,
}

/// Resources that the node reclaims before it evicts pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reclaim {
    /// Containers that have exited, and sandboxes without containers.
    DeadContainers,
    /// Images that no container uses.
    UnusedImages,
}

impl Layout {
    /// Returns the layout from two facts: images are not on the file system of the root directory, and
    /// writable layers are not on the file system of images.
    #[must_use]
    pub fn of(has_image_fs: bool, has_container_fs: bool) -> Self {
        match (has_image_fs, has_container_fs) {
            (true, true) => Self::Split,
            (true, false) => Self::SeparateImages,
            (false, _) => Self::Single,
        }
    }

    /// Returns the files of pods that count for a signal (`buildSignalToRankFunc`).
    #[must_use]
    pub fn measured(self, signal: Signal) -> &'static [Files] {
        use Files::{LocalVolumes, Logs, WritableLayers};
        match (self, disk_of(signal)) {
            (_, None) | (Self::Split, Some(Disk::Images)) => &[],
            (Self::Single, Some(_)) | (Self::Split, Some(Disk::Node | Disk::Containers)) => {
                &[WritableLayers, Logs, LocalVolumes]
            }
            (Self::SeparateImages, Some(Disk::Node)) => &[Logs, LocalVolumes],
            (Self::SeparateImages, Some(Disk::Images | Disk::Containers)) => &[WritableLayers],
        }
    }

    /// Returns what the node deletes for a signal, in this order, before it evicts pods
    /// (`buildSignalToNodeReclaimFuncs`).
    #[must_use]
    pub fn reclaims(self, signal: Signal) -> &'static [Reclaim] {
        use Reclaim::{DeadContainers, UnusedImages};
        match (self, disk_of(signal)) {
            (_, None) | (Self::SeparateImages, Some(Disk::Node)) => &[],
            (Self::Single, Some(_)) | (Self::SeparateImages, Some(Disk::Images | Disk::Containers)) => {
                &[DeadContainers, UnusedImages]
            }
            (Self::Split, Some(Disk::Images)) => &[UnusedImages],
            (Self::Split, Some(Disk::Node | Disk::Containers)) => &[DeadContainers],
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Disk {
    Node,
    Images,
    Containers,
}

fn disk_of(signal: Signal) -> Option<Disk> {
    match signal {
        Signal::NodeFsAvailable | Signal::NodeFsInodesFree => Some(Disk::Node),
        Signal::ImageFsAvailable | Signal::ImageFsInodesFree => Some(Disk::Images),
        Signal::ContainerFsAvailable | Signal::ContainerFsInodesFree => Some(Disk::Containers),
        Signal::MemoryAvailable | Signal::AllocatableMemoryAvailable | Signal::PidAvailable => {
            debug_assert!(matches!(signal.resource(), Resource::Memory | Resource::Pids));
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Files::{LocalVolumes, Logs, WritableLayers};
    use Reclaim::{DeadContainers, UnusedImages};

    #[test]
    fn each_layout_measures_and_reclaims_what_is_on_the_file_system_of_the_signal() {
        let all = [WritableLayers, Logs, LocalVolumes].as_slice();
        let both = [DeadContainers, UnusedImages].as_slice();
        let node = [Logs, LocalVolumes].as_slice();
        let layers = [WritableLayers].as_slice();
        // Node, image and container file system.
        for (layout, measured, reclaims) in [
            (Layout::Single, [all, all, all], [both, both, both]),
            (Layout::SeparateImages, [node, layers, layers], [&[], both, both]),
            (Layout::Split, [all, &[], all], [&[DeadContainers], &[UnusedImages], &[DeadContainers]]),
        ] {
            for (n, signals) in [
                [Signal::NodeFsAvailable, Signal::NodeFsInodesFree],
                [Signal::ImageFsAvailable, Signal::ImageFsInodesFree],
                [Signal::ContainerFsAvailable, Signal::ContainerFsInodesFree],
            ]
            .into_iter()
            .enumerate()
            {
                for signal in signals {
                    assert_eq!(layout.measured(signal), measured[n], "{layout:?} {signal}");
                    assert_eq!(layout.reclaims(signal), reclaims[n], "{layout:?} {signal}");
                }
            }
            for signal in [Signal::MemoryAvailable, Signal::AllocatableMemoryAvailable, Signal::PidAvailable]
            {
                assert!(layout.measured(signal).is_empty() && layout.reclaims(signal).is_empty());
            }
        }
    }

    #[test]
    fn the_layout_follows_from_the_devices() {
        for (image, container, want) in [
            (false, false, Layout::Single),
            (false, true, Layout::Single),
            (true, false, Layout::SeparateImages),
            (true, true, Layout::Split),
        ] {
            assert_eq!(Layout::of(image, container), want);
        }
    }
}
