//! The mounts of this mount namespace (`/proc/self/mountinfo`).

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

/// The mount table of this process.
pub const FILE: &str = "/proc/self/mountinfo";

/// A line of the mount table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Numbers of the device, such as `8:0`.
    pub device: String,
    /// The directory of the file system that is mounted.
    pub root: PathBuf,
    /// The mount point.
    pub path: PathBuf,
    /// File system type, for example `tmpfs` or `hugetlbfs`.
    pub fs_type: String,
    /// Options of the file system, separated by commas.
    pub options: String,
    /// Whether the mount has shared propagation.
    pub is_shared: bool,
}

impl Mount {
    /// Returns the value of an option of the file system; empty for an option without one. The quotes around
    /// a value with a comma are removed.
    #[must_use]
    pub fn option(&self, name: &str) -> Option<&str> {
        let mut rest = self.options.as_str();
        while !rest.is_empty() {
            let mut is_quoted = false;
            let end = rest.find(|c: char| {
                is_quoted ^= c == '"';
                c == ',' && !is_quoted
            });
            let (option, next) = end.and_then(|end| rest.split_at_checked(end)).unwrap_or((rest, ""));
            let (key, value) = option.split_once('=').unwrap_or((option, ""));
            if key == name {
                let unquoted = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
                return Some(unquoted.unwrap_or(value));
            }
            rest = next.strip_prefix(',').unwrap_or(next);
        }
        None
    }
}

/// Returns all mounts, oldest first. Reading the whole table is expensive on a full node. Blocks.
///
/// # Errors
/// Fails if the table cannot be read.
pub fn read() -> io::Result<Vec<Mount>> {
    let table = fs::read(FILE)?;
    let lines = table.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    lines.map(|line| parse(line).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))).collect()
}

/// Parses a line: ID, parent, device, root, mount point, options of the mount, optional fields, `-`, type,
/// source, options of the file system. The source may be empty.
fn parse(line: &[u8]) -> Option<Mount> {
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let (mount, file_system) = fields.split_at_checked(fields.iter().position(|field| *field == b"-")?)?;
    let text = |field: &[u8]| String::from_utf8_lossy(&unescape(field)).into_owned();
    let path = |field: &[u8]| PathBuf::from(OsString::from_vec(unescape(field)));
    Some(Mount {
        device: text(mount.get(2)?),
        root: path(mount.get(3)?),
        path: path(mount.get(4)?),
        fs_type: text(file_system.get(1)?),
        options: text(file_system.last()?),
        is_shared: mount.get(6..)?.iter().any(|field| field.starts_with(b"shared:")),
    })
}

/// The kernel writes space, tab, newline and backslash as three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, tail)) = rest.split_first() {
        let digits = (*first == b'\\').then(|| tail.split_at_checked(3)).flatten();
        let code = digits.and_then(|(digits, tail)| {
            Some((u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok()?, tail))
        });
        let (byte, next) = code.unwrap_or((*first, tail));
        out.push(byte);
        rest = next;
    }
    out
}

/// Returns whether something is mounted at a path.
#[must_use]
pub fn is_mount_point(mounts: &[Mount], path: &Path) -> bool {
    mounts.iter().any(|mount| mount.path == path)
}

/// Returns the mounts below `below` of the directory `path`, and of directories below it, sorted
/// (`k8s.io/mount-utils: SearchMountPoints`).
#[must_use]
pub fn references(mounts: &[Mount], path: &Path, below: &Path) -> Vec<String> {
    // The mount that the directory is on. A later mount hides an earlier one.
    let above = mounts.iter().enumerate().filter(|(_, mount)| path.starts_with(&mount.path));
    let on = above.max_by_key(|(at, mount)| (mount.path.components().count(), *at)).map(|(_, mount)| mount);
    let Some((on, rest)) = on.and_then(|on| Some((on, path.strip_prefix(&on.path).ok()?))) else {
        return Vec::new();
    };
    let source = if rest.as_os_str().is_empty() { on.root.clone() } else { on.root.join(rest) };
    let refers = |mount: &&Mount| {
        mount.device == on.device && mount.root.starts_with(&source) && mount.path.starts_with(below)
    };
    let mut found: Vec<String> =
        mounts.iter().filter(refers).map(|mount| mount.path.display().to_string()).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(device: &str, root: &str, path: &str) -> Mount {
        Mount {
            device: device.to_owned(),
            root: PathBuf::from(root),
            path: PathBuf::from(path),
            fs_type: "ext4".to_owned(),
            options: "rw".to_owned(),
            is_shared: false,
        }
    }

    #[test]
    fn a_line_is_read_with_its_escapes_its_optional_fields_and_an_empty_source() {
        let line = br"36 35 98:0 /mnt\0401 /mnt/a\134b rw,noatime master:1 shared:2 - tmpfs  rw,size=1k";
        let read = parse(line).unwrap();
        assert_eq!(
            read,
            Mount {
                fs_type: "tmpfs".to_owned(),
                options: "rw,size=1k".to_owned(),
                is_shared: true,
                ..mount("98:0", "/mnt 1", "/mnt/a\\b")
            }
        );
        assert!(!parse(b"36 35 98:0 / /a rw master:1 - ext4 /dev/sda rw").unwrap().is_shared);
        assert!(!parse(b"36 35 98:0 / /a rw - ext4 shared:1 rw").unwrap().is_shared, "the source");
        for line in [&b"36 35 98:0 / /a rw ext4 /dev/sda rw"[..], b"36 35 - ext4", b"- ext4 d rw", b"x"] {
            assert_eq!(parse(line), None, "{}", String::from_utf8_lossy(line));
        }
        assert_eq!(unescape(br"a\040b\134c\x\99"), br"a b\c\x\99");
        assert!(is_mount_point(&super::read().unwrap(), Path::new("/proc")));
    }

    #[test]
    fn an_option_is_read_with_its_quoted_value() {
        let label = "system_u:object_r:container_file_t:s0:c1,c2";
        for (options, name, expected) in [
            ("rw,pagesize=2M", "pagesize", Some("2M")),
            ("rw,pagesize=2M", "rw", Some("")),
            ("rw,pagesize=2M", "page", None),
            ("rw,context=\"system_u:object_r:container_file_t:s0:c1,c2\",noatime", "context", Some(label)),
            ("rw,context=\"system_u:object_r:container_file_t:s0:c1,c2\",noatime", "noatime", Some("")),
            ("rw,context=\"system_u:object_r:container_file_t:s0:c1,c2\"", "c2\"", None),
            ("rw,context=a:b:c:s0", "context", Some("a:b:c:s0")),
            ("", "rw", None),
        ] {
            let mount = Mount { options: options.to_owned(), ..mount("8:1", "/", "/") };
            assert_eq!(mount.option(name), expected, "{name} of {options}");
        }
    }

    #[test]
    fn mounts_of_a_directory_are_found_by_device_and_path_in_the_file_system() {
        let mounts = [
            mount("8:1", "/", "/"),
            mount("8:2", "/", "/mnt"),
            mount("8:2", "/disks/a", "/r/pods/u1/volumes/m"),
            mount("8:2", "/disks/a/sub", "/r/pods/u2/volume-subpaths/m"),
            mount("8:2", "/disks/ab", "/r/pods/u3/volumes/m"),
            mount("8:1", "/disks/a", "/r/pods/u4/volumes/m"),
            mount("8:2", "/disks/a", "/elsewhere"),
        ];
        let found = |path: &str| references(&mounts, Path::new(path), Path::new("/r/pods"));
        assert_eq!(found("/mnt/disks/a"), ["/r/pods/u1/volumes/m", "/r/pods/u2/volume-subpaths/m"]);
        assert_eq!(found("/mnt/disks/ab"), ["/r/pods/u3/volumes/m"]);
        assert_eq!(found("/disks/a"), ["/r/pods/u4/volumes/m"]);
        assert_eq!(found("/other"), Vec::<String>::new());
        // A mount point, whose later mount hides the earlier one.
        assert_eq!(found("/elsewhere"), found("/mnt/disks/a"));
        let hidden = [&mounts[..], &[mount("8:3", "/", "/elsewhere")]].concat();
        assert_eq!(references(&hidden, Path::new("/elsewhere"), Path::new("/r/pods")), Vec::<String>::new());
    }
}
