//! The global directory of a disk, and the configuration of an iSCSI disk in it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use quintlet_kit::{atomic_file, task};
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags};

use crate::error::Error;
use crate::host::{entries, name_of};
use crate::iscsi::{Disk, Other};
use crate::mount::make_directory;
use crate::removal;

/// File with the configuration of an iSCSI disk, in its global directory.
const ISCSI_FILE: &str = "iscsi.json";
/// The same file while it is written.
const NEW_ISCSI_FILE: &str = "iscsi.json.new";

/// Returns whether a file of a global directory is that of this crate, and no volume of a pod.
pub(crate) fn is_own_file(file: &Path) -> bool {
    [ISCSI_FILE, NEW_ISCSI_FILE].contains(&name_of(file).as_str())
}

/// Writes the configuration of a disk to its global directory, which nothing is mounted at.
pub(crate) fn write_disk(directory: &Path, disk: &Disk) -> Result<(), Error> {
    make_directory(directory)?;
    let file = directory.join(ISCSI_FILE);
    let text = serde_json::to_string(disk).map_err(|e| Error::file("write", &file)(io::Error::other(e)))?;
    atomic_file::write_durable_through(&file, NEW_ISCSI_FILE, text.as_bytes(), 0o644)
        .map_err(Error::file("write", &file))
}

/// Reads the configuration of a disk; `None` if it cannot be read.
pub(crate) async fn read_disk(directory: &Path) -> Option<Disk> {
    let directory = directory.to_owned();
    task::blocking(move || read_disk_of(&directory)).await
}

pub(crate) fn read_disk_of(directory: &Path) -> Option<Disk> {
    let text = fs::read_to_string(directory.join(ISCSI_FILE)).ok()?;
    let disk = serde_json::from_str::<Disk>(&text).ok()?;
    (!disk.portals.is_empty() && !disk.iqn.is_empty()).then_some(disk)
}

/// Returns the other volumes of a target, with a file system or as block devices.
pub(crate) fn others(roots: &[PathBuf], own: &Path, iqn: &str) -> Result<Vec<Other>, Error> {
    let mut others = Vec::new();
    for root in roots {
        for iface in entries(root).map_err(Error::file("read", root))? {
            if !name_of(&iface).starts_with("iface-") {
                continue;
            }
            for directory in entries(&iface).map_err(Error::file("read", &iface))? {
                let name = format!("{}/{}", name_of(&iface), name_of(&directory));
                let Some(named) = Disk::of_directory(&name).filter(|disk| disk.iqn == iqn) else { continue };
                if directory == own {
                    continue;
                }
                let portals =
                    read_disk_of(&directory).filter(|disk| disk.iqn == iqn).map(|disk| disk.portals);
                let first_portal = named.portals.into_iter().next().unwrap_or_default();
                others.push(Other { first_portal, portals, lun: named.lun });
            }
        }
    }
    Ok(others)
}

/// Removes a global directory and the configuration in it, and its parent if that is of this volume alone.
/// The kernel refuses if something is mounted there.
pub(crate) fn remove_directory(directory: &Path, has_own_parent: bool) -> Result<(), Error> {
    let (Some(parent), Some(name)) = (directory.parent(), directory.file_name()) else { return Ok(()) };
    let failed = |error: rustix::io::Errno| Error::file("remove directory", directory)(error.into());
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let of_parent = match rustix::fs::open(parent, flags, Mode::empty()) {
        Err(rustix::io::Errno::NOENT) => return Ok(()),
        other => other.map_err(failed)?,
    };
    let beneath = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH;
    let opened = match rustix::fs::openat2(&of_parent, name, flags, Mode::empty(), beneath) {
        Err(rustix::io::Errno::NOENT) => return Ok(()),
        other => other.map_err(failed)?,
    };
    for file in [NEW_ISCSI_FILE, ISCSI_FILE] {
        match rustix::fs::unlinkat(&opened, file, AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(error) => return Err(failed(error)),
        }
    }
    removal::directory(directory)?;
    if has_own_parent { removal::directory(parent) } else { Ok(()) }
}
