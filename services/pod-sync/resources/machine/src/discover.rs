//! Reads the machine from sysfs.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::cpu_set::CpuSet;
use crate::ids::{CacheId, CoreId, CpuId, InvalidNumaNode, NumaNode, SocketId};
use crate::topology::{CpuPlace, CpuTopology};

/// Lowest level of a cache that counts as a last-level cache.
const LAST_LEVEL: u32 = 3;

/// The CPUs and the NUMA nodes of a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Machine {
    /// The CPUs that are online.
    pub cpus: CpuTopology,
    /// The NUMA nodes, also those without CPUs. Where the kernel has no NUMA nodes, each socket is one, with
    /// its number.
    pub nodes: BTreeMap<NumaNode, NodeMemory>,
}

/// The memory of a NUMA node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeMemory {
    /// Size in bytes, with the huge pages; 0 if the kernel does not report it.
    pub bytes: u64,
    /// Number of preallocated huge pages by their size in bytes.
    pub huge_pages: BTreeMap<u64, u64>,
    /// Distance to each NUMA node, with this one; empty if the kernel does not report it.
    pub distances: BTreeMap<NumaNode, u64>,
}

/// Reason why the machine could not be read.
#[derive(Debug, thiserror::Error)]
pub enum DiscoverError {
    /// A file or directory cannot be read.
    #[error("failed to read {}", path.display())]
    Read {
        /// Path of the file or directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A file has another content than a number or a list of CPUs.
    #[error("unexpected content of {}: {text:?}", path.display())]
    Content {
        /// Path of the file.
        path: PathBuf,
        /// Content of the file.
        text: String,
    },
    /// The number of a NUMA node is too high.
    #[error(transparent)]
    Node(#[from] InvalidNumaNode),
    /// No CPU is online.
    #[error("could not detect number of cpus")]
    NoCpus,
}

/// Reads the machine below `sys`, which is `/sys` on a machine (cAdvisor's `utils/sysinfo: GetNodesInfo`).
/// Blocks.
///
/// # Errors
/// See [`DiscoverError`]. Caches, memory, huge pages and distances may be absent.
pub fn discover(sys: &Path) -> Result<Machine, DiscoverError> {
    let sysfs = Sysfs::open(sys)?;
    let node_dirs = numbered(&sysfs.system.join("node"), "node")?;
    let machine = if node_dirs.is_empty() {
        sysfs.machine_without_nodes()?
    } else {
        sysfs.machine_with_nodes(&node_dirs)?
    };
    if machine.cpus.places().is_empty() { Err(DiscoverError::NoCpus) } else { Ok(machine) }
}

struct Sysfs {
    /// `/sys/devices/system`.
    system: PathBuf,
    /// The CPUs that are online; none if the kernel cannot take a CPU offline.
    online: Option<CpuSet>,
}

/// A core of one NUMA node.
struct Core {
    socket: SocketId,
    threads: BTreeSet<CpuId>,
    cache: CacheId,
}

impl Sysfs {
    fn open(sys: &Path) -> Result<Self, DiscoverError> {
        let system = sys.join("devices/system");
        let path = system.join("cpu/online");
        let online = match optional(&path)? {
            None => None,
            Some(text) => Some(text.parse().map_err(|_| DiscoverError::Content { path, text })?),
        };
        Ok(Self { system, online })
    }

    fn machine_with_nodes(&self, node_dirs: &BTreeMap<u64, PathBuf>) -> Result<Machine, DiscoverError> {
        let mut places = BTreeMap::new();
        let mut nodes = BTreeMap::new();
        for (number, dir) in node_dirs {
            let node = NumaNode::try_from(*number)?;
            let cpus = numbered(dir, "cpu")?.into_keys().filter_map(|cpu| u32::try_from(cpu).ok());
            place(&mut places, node, &self.cores(cpus.map(CpuId::new))?);
            nodes.insert(node, node_memory(dir, node_dirs)?);
        }
        Ok(Machine { cpus: CpuTopology::new(places), nodes })
    }

    /// Takes the sockets for NUMA nodes.
    fn machine_without_nodes(&self) -> Result<Machine, DiscoverError> {
        let cpus = numbered(&self.system.join("cpu"), "cpu")?.into_keys();
        let mut sockets: BTreeMap<u64, Vec<CpuId>> = BTreeMap::new();
        for cpu in cpus.filter_map(|cpu| u32::try_from(cpu).ok()).map(CpuId::new) {
            if let Some(socket) = optional_number::<u64>(&self.topology_file(cpu, "physical_package_id"))? {
                sockets.entry(socket).or_default().push(cpu);
            }
        }
        let mut places = BTreeMap::new();
        let mut nodes = BTreeMap::new();
        for (socket, cpus) in sockets {
            let node = NumaNode::try_from(socket)?;
            place(&mut places, node, &self.cores(cpus)?);
            nodes.insert(node, NodeMemory::default());
        }
        Ok(Machine { cpus: CpuTopology::new(places), nodes })
    }

    fn topology_file(&self, cpu: CpuId, name: &str) -> PathBuf {
        self.system.join(format!("cpu/cpu{cpu}/topology/{name}"))
    }

    /// Returns the cores of a NUMA node. A CPU that is offline, or that the kernel gives no core, belongs to
    /// none.
    fn cores(&self, cpus: impl IntoIterator<Item = CpuId>) -> Result<Vec<Core>, DiscoverError> {
        let mut cores: BTreeMap<(i64, i64), BTreeSet<CpuId>> = BTreeMap::new();
        for cpu in cpus {
            if self.online.as_ref().is_some_and(|online| !online.contains(cpu)) {
                continue;
            }
            let core = optional_number::<i64>(&self.topology_file(cpu, "core_id"))?;
            let socket = optional_number::<i64>(&self.topology_file(cpu, "physical_package_id"))?;
            if let (Some(core), Some(socket)) = (core, socket) {
                cores.entry((socket, core)).or_default().insert(cpu);
            }
        }
        let core_count = cores.len();
        // As in cAdvisor, the caches that were read before a failure count.
        let mut are_caches_known = true;
        let with_cache = |((socket, _), threads): ((i64, i64), BTreeSet<CpuId>)| {
            let of_node = threads.len().saturating_mul(core_count);
            let shared =
                threads.first().filter(|_| are_caches_known).map(|cpu| self.shared_cache(*cpu, of_node));
            are_caches_known &= matches!(shared, Some(Ok(_)));
            let cache = shared.and_then(Result::ok).flatten().unwrap_or(CacheId::new(socket));
            Core { socket: SocketId::new(socket), threads, cache }
        };
        Ok(cores.into_iter().map(with_cache).collect())
    }

    /// Returns the first last-level cache of a CPU that not all CPUs of its NUMA node share (`addCacheInfo`).
    fn shared_cache(&self, cpu: CpuId, cpus_of_node: usize) -> Result<Option<CacheId>, DiscoverError> {
        let mut first = None;
        for dir in numbered(&self.system.join(format!("cpu/cpu{cpu}/cache")), "index")?.into_values() {
            let id = number::<i64>(&dir.join("id"))?;
            let level = number::<u32>(&dir.join("level"))?;
            let shared_by = bits(&dir.join("shared_cpu_map"))?;
            if level >= LAST_LEVEL && shared_by != cpus_of_node && first.is_none() {
                first = Some(CacheId::new(id));
            }
        }
        Ok(first)
    }
}

fn place(places: &mut BTreeMap<CpuId, CpuPlace>, node: NumaNode, cores: &[Core]) {
    for core in cores {
        let Some(lowest) = core.threads.first() else { continue };
        let place =
            CpuPlace { node, socket: core.socket, cache: core.cache, core: CoreId::new(lowest.number()) };
        places.extend(core.threads.iter().map(|cpu| (*cpu, place)));
    }
}

fn node_memory(dir: &Path, node_dirs: &BTreeMap<u64, PathBuf>) -> Result<NodeMemory, DiscoverError> {
    let path = dir.join("meminfo");
    let bytes = match optional(&path)? {
        None => 0,
        Some(text) => memory_total(&text).ok_or(DiscoverError::Content { path, text })?,
    };
    let mut huge_pages = BTreeMap::new();
    for (name, dir) in entries(&dir.join("hugepages"))? {
        let size =
            name.strip_prefix("hugepages-").and_then(|size| size.strip_suffix("kB")?.parse::<u64>().ok());
        if let Some(size) = size {
            huge_pages.insert(size.saturating_mul(1024), number(&dir.join("nr_hugepages"))?);
        }
    }
    Ok(NodeMemory { bytes, huge_pages, distances: distances(dir, node_dirs)? })
}

fn memory_total(text: &str) -> Option<u64> {
    let rest = text.split_once("MemTotal:")?.1;
    let mut words = rest.split_whitespace();
    let kibibytes: u64 = words.next()?.parse().ok()?;
    words.next().filter(|unit| *unit == "kB").map(|_| kibibytes.saturating_mul(1024))
}

/// Returns the distances of a node. The file has one for each node that is online, in the order of their
/// numbers.
fn distances(
    dir: &Path,
    node_dirs: &BTreeMap<u64, PathBuf>,
) -> Result<BTreeMap<NumaNode, u64>, DiscoverError> {
    let path = dir.join("distance");
    let Some(text) = optional(&path)? else { return Ok(BTreeMap::new()) };
    let parsed: Result<Vec<u64>, _> = text.split_whitespace().map(str::parse).collect();
    let values = parsed.map_err(|_| DiscoverError::Content { path, text })?;
    if values.len() != node_dirs.len() {
        return Ok(BTreeMap::new());
    }
    let nodes = node_dirs.keys().map(|number| NumaNode::try_from(*number));
    nodes.zip(values).map(|(node, distance)| Ok((node?, distance))).collect()
}

/// Returns the directories of `dir` whose names are a prefix and a number. A directory that does not exist
/// has none.
fn numbered(dir: &Path, prefix: &str) -> Result<BTreeMap<u64, PathBuf>, DiscoverError> {
    let number = |name: &str| name.strip_prefix(prefix)?.parse().ok();
    Ok(entries(dir)?.into_iter().filter_map(|(name, path)| Some((number(&name)?, path))).collect())
}

fn entries(dir: &Path) -> Result<BTreeMap<String, PathBuf>, DiscoverError> {
    let failed = |source| DiscoverError::Read { path: dir.to_owned(), source };
    let read = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        read => read.map_err(failed)?,
    };
    let named = |entry: io::Result<std::fs::DirEntry>| {
        let entry = entry.map_err(failed)?;
        Ok(entry.file_name().into_string().ok().map(|name| (name, entry.path())))
    };
    read.filter_map(|entry| named(entry).transpose()).collect()
}

fn optional(path: &Path) -> Result<Option<String>, DiscoverError> {
    match std::fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Ok(text) => Ok(Some(text.trim().to_owned())),
        Err(source) => Err(DiscoverError::Read { path: path.to_owned(), source }),
    }
}

fn required(path: &Path) -> Result<String, DiscoverError> {
    let missing = || DiscoverError::Read { path: path.to_owned(), source: io::ErrorKind::NotFound.into() };
    optional(path)?.ok_or_else(missing)
}

fn number<T: FromStr>(path: &Path) -> Result<T, DiscoverError> {
    let text = required(path)?;
    text.parse().map_err(|_| DiscoverError::Content { path: path.to_owned(), text })
}

fn optional_number<T: FromStr>(path: &Path) -> Result<Option<T>, DiscoverError> {
    let Some(text) = optional(path)? else { return Ok(None) };
    let parsed = text.parse().map_err(|_| DiscoverError::Content { path: path.to_owned(), text });
    parsed.map(Some)
}

/// Returns the number of ones in a mask, such as `000000ff,00000000`.
fn bits(path: &Path) -> Result<usize, DiscoverError> {
    let text = required(path)?;
    let ones = |word: &str| u64::from_str_radix(word.trim(), 16).map(u64::count_ones);
    let counts: Result<Vec<u32>, _> = text.split(',').map(ones).collect();
    let counts = counts.map_err(|_| DiscoverError::Content { path: path.to_owned(), text })?;
    Ok(counts.into_iter().fold(0, |sum, count| sum.saturating_add(usize::try_from(count).unwrap_or(0))))
}

#[cfg(test)]
mod tests;
