//! The volumes: directories below the state directory, tmpfs, or files behind loop devices.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::mount::{MountFlags, UnmountFlags};
use sha2::{Digest as _, Sha256};

/// Attribute of a volume with its medium: `directory` (the default), `tmpfs` or `loop`.
pub const MEDIUM: &str = "medium";
/// Size of a new file behind a loop device, in bytes.
const LOOP_SIZE: u64 = 16 << 20;

/// The volumes in a state directory.
#[derive(Debug)]
pub struct Volumes {
    state: PathBuf,
}

/// Backing store of a volume.
#[derive(Debug, Clone)]
pub enum Medium {
    /// A directory, which is bind-mounted.
    Directory(PathBuf),
    /// A tmpfs of the node.
    Tmpfs,
    /// A file with an ext4 file system.
    Loop(PathBuf),
}

impl Volumes {
    /// Returns the volumes in a state directory.
    ///
    /// # Errors
    /// Fails if the directory cannot be created.
    pub fn new(state: &Path) -> io::Result<Self> {
        fs::create_dir_all(state.join("volumes"))?;
        Ok(Self { state: state.to_owned() })
    }

    /// Returns the backing store of a volume, which is created on first use.
    ///
    /// # Errors
    /// Fails if it cannot be created.
    pub fn medium(&self, handle: &str, attributes: &BTreeMap<String, String>) -> io::Result<Medium> {
        let path = self.backing(handle);
        match attributes.get(MEDIUM).map(String::as_str) {
            Some("tmpfs") => Ok(Medium::Tmpfs),
            Some("loop") => {
                if !path.exists() {
                    fs::File::create(&path)?.set_len(LOOP_SIZE)?;
                    run("mkfs.ext4", &[Path::new("-q"), Path::new("-F"), &path])?;
                }
                Ok(Medium::Loop(path))
            }
            _ => {
                fs::create_dir_all(&path)?;
                Ok(Medium::Directory(path))
            }
        }
    }

    /// Returns the path of the backing store of a volume.
    #[must_use]
    pub fn backing(&self, handle: &str) -> PathBuf {
        self.state.join("volumes").join(hex::encode(Sha256::digest(handle)))
    }
}

/// Mounts a backing store. Does nothing if the target is mounted.
///
/// # Errors
/// Fails if the mount fails.
pub fn mount(medium: &Medium, target: &Path) -> io::Result<()> {
    if is_mounted(target)? {
        return Ok(());
    }
    match medium {
        Medium::Directory(source) => Ok(rustix::mount::mount_bind(source, target)?),
        Medium::Tmpfs => {
            Ok(rustix::mount::mount("tmpfs", target, "tmpfs", MountFlags::empty(), Some(c"size=1m"))?)
        }
        Medium::Loop(file) => run("mount", &[Path::new("-o"), Path::new("loop"), file, target]).map(drop),
    }
}

/// Mounts a directory or device at `target`, which exists. Does nothing if the target is mounted.
///
/// # Errors
/// Fails if the mount fails.
pub fn bind(source: &Path, target: &Path, read_only: bool) -> io::Result<()> {
    if is_mounted(target)? {
        return Ok(());
    }
    rustix::mount::mount_bind(source, target)?;
    if read_only {
        rustix::mount::mount_remount(target, MountFlags::BIND | MountFlags::RDONLY, "")?;
    }
    Ok(())
}

/// Unmounts all mounts at `target`.
///
/// # Errors
/// Fails if a mount is busy.
pub fn unmount(target: &Path) -> io::Result<()> {
    while is_mounted(target)? {
        rustix::mount::unmount(target, UnmountFlags::NOFOLLOW)?;
    }
    Ok(())
}

/// Returns whether a path is a mount point.
///
/// # Errors
/// Fails if the mount table cannot be read.
pub fn is_mounted(path: &Path) -> io::Result<bool> {
    Ok(mounts_below(path)?.iter().any(|mount| mount == path))
}

/// Returns the mount points at a path and below it.
///
/// # Errors
/// Fails if the mount table cannot be read.
pub fn mounts_below(path: &Path) -> io::Result<Vec<PathBuf>> {
    let table = procfs::process::Process::myself().and_then(|p| p.mountinfo()).map_err(io::Error::other)?;
    Ok(table.0.into_iter().map(|mount| mount.mount_point).filter(|mount| mount.starts_with(path)).collect())
}

/// Returns the loop device of a file. Attaches one if there is none.
///
/// # Errors
/// Fails if there is no free device.
pub fn loop_device(file: &Path) -> io::Result<PathBuf> {
    if let Some(device) = loop_devices(file)?.into_iter().next() {
        return Ok(device);
    }
    let device = run("losetup", &[Path::new("--find"), Path::new("--show"), file])?;
    Ok(PathBuf::from(device.trim()))
}

/// Detaches all loop devices of a file, which may not exist.
///
/// # Errors
/// Fails if a device cannot be detached.
pub fn detach(file: &Path) -> io::Result<()> {
    if !file.is_file() {
        return Ok(());
    }
    for device in loop_devices(file)? {
        run("losetup", &[Path::new("--detach"), &device])?;
    }
    Ok(())
}

fn loop_devices(file: &Path) -> io::Result<Vec<PathBuf>> {
    let options = ["--noheadings", "--output", "NAME", "--associated"].map(Path::new);
    let list = run("losetup", &[&options[..], &[file]].concat())?;
    Ok(list.lines().map(|name| PathBuf::from(name.trim())).collect())
}

/// Runs a program. Returns its output.
fn run(program: &str, arguments: &[&Path]) -> io::Result<String> {
    let output = Command::new(program).args(arguments).output()?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(io::Error::other(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim())))
}
