use std::fs;

use super::*;

/// A machine whose parts all have as many parts of the next kind.
#[derive(Clone, Copy)]
struct Shape {
    sockets: u32,
    nodes_per_socket: u32,
    caches_per_node: u32,
    cores_per_cache: u32,
    threads: u32,
}

/// A directory in the form of `/sys`.
struct FakeSys {
    dir: tempfile::TempDir,
}

impl FakeSys {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn write(&self, path: &str, text: impl AsRef<str>) {
        let path = self.dir.path().join("devices/system").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{}\n", text.as_ref())).unwrap();
    }

    fn remove(&self, path: &str) {
        let path = self.dir.path().join("devices/system").join(path);
        if path.is_dir() { fs::remove_dir_all(path).unwrap() } else { fs::remove_file(path).unwrap() }
    }

    /// Writes a machine. Siblings are numbered after all first threads, as on most x86 machines.
    fn regular(shape: Shape) -> Self {
        let sys = Self::new();
        let nodes = shape.sockets * shape.nodes_per_socket;
        let cores_per_node = shape.caches_per_node * shape.cores_per_cache;
        let cores = nodes * cores_per_node;
        sys.write("cpu/online", format!("0-{}", cores * shape.threads - 1));
        let map = |cpus: &[u32]| {
            let words = (cores * shape.threads).div_ceil(32);
            let word = |number: u32| {
                let ones = cpus.iter().filter(|cpu| **cpu / 32 == number).map(|cpu| 1_u32 << (cpu % 32));
                format!("{:08x}", ones.sum::<u32>())
            };
            (0..words).rev().map(word).collect::<Vec<_>>().join(",")
        };
        let threads = |cores_of: std::ops::Range<u32>| -> Vec<u32> {
            (0..shape.threads).flat_map(|t| cores_of.clone().map(move |core| t * cores + core)).collect()
        };
        for core in 0..cores {
            let node = core / cores_per_node;
            let cache = core / shape.cores_per_cache;
            let of_cache = threads(cache * shape.cores_per_cache..(cache + 1) * shape.cores_per_cache);
            for cpu in threads(core..core + 1) {
                let cpu_dir = format!("cpu/cpu{cpu}");
                // The number of a core is unique in its socket only.
                let core_of_socket = core % (cores / shape.sockets);
                sys.write(&format!("{cpu_dir}/topology/core_id"), core_of_socket.to_string());
                let socket = node / shape.nodes_per_socket;
                sys.write(&format!("{cpu_dir}/topology/physical_package_id"), socket.to_string());
                for (index, level, cpus) in [
                    (0, 1, threads(core..core + 1)),
                    (1, 2, threads(core..core + 1)),
                    (2, 3, of_cache.clone()),
                ] {
                    let index = format!("{cpu_dir}/cache/index{index}");
                    sys.write(&format!("{index}/id"), cache.to_string());
                    sys.write(&format!("{index}/level"), level.to_string());
                    sys.write(&format!("{index}/shared_cpu_map"), map(&cpus));
                }
                sys.write(&format!("node/node{node}/cpu{cpu}/online"), "1");
            }
        }
        for node in 0..nodes {
            sys.write_node(node, nodes, shape.nodes_per_socket);
        }
        sys
    }

    fn write_node(&self, node: u32, nodes: u32, nodes_per_socket: u32) {
        let dir = format!("node/node{node}");
        let kibibytes = 1_048_576 + node;
        self.write(
            &format!("{dir}/meminfo"),
            format!("Node {node} MemTotal: {kibibytes} kB\nNode {node} MemFree: 1 kB"),
        );
        self.write(&format!("{dir}/hugepages/hugepages-2048kB/nr_hugepages"), (node * 10).to_string());
        self.write(&format!("{dir}/hugepages/hugepages-1048576kB/nr_hugepages"), "0");
        let distance = |other: u32| match (node == other, node / nodes_per_socket == other / nodes_per_socket)
        {
            (true, _) => "10",
            (false, true) => "12",
            (false, false) => "32",
        };
        self.write(&format!("{dir}/distance"), (0..nodes).map(distance).collect::<Vec<_>>().join(" "));
    }

    fn machine(&self) -> Machine {
        discover(self.dir.path()).unwrap()
    }
}

fn node(number: u64) -> NumaNode {
    NumaNode::try_from(number).unwrap()
}

fn shape(sockets: u32, nodes_per_socket: u32, caches_per_node: u32, cores: u32, threads: u32) -> Shape {
    Shape { sockets, nodes_per_socket, caches_per_node, cores_per_cache: cores, threads }
}

#[test]
fn machines_with_1_to_8_numa_nodes_with_and_without_smt_are_read() {
    // Sockets, nodes per socket, caches per node, cores per cache, threads: a place per CPU number.
    let table = [
        (shape(1, 1, 1, 4, 1), vec![(0, (0, 0, 0, 0)), (3, (0, 0, 0, 3))]),
        (shape(1, 1, 1, 4, 2), vec![(0, (0, 0, 0, 0)), (4, (0, 0, 0, 0)), (7, (0, 0, 0, 3))]),
        // Two sockets, one node each: the cache of a node has the number of the socket.
        (shape(2, 1, 1, 4, 2), vec![(3, (0, 0, 0, 3)), (4, (1, 1, 1, 4)), (15, (1, 1, 1, 7))]),
        // Four nodes in two sockets: a cache per node counts as one per socket.
        (shape(2, 2, 1, 2, 1), vec![(1, (0, 0, 0, 1)), (2, (1, 0, 0, 2)), (7, (3, 1, 1, 7))]),
        // Eight nodes, two caches in each.
        (shape(2, 4, 2, 2, 2), vec![(0, (0, 0, 0, 0)), (2, (0, 0, 1, 2)), (63, (7, 1, 15, 31))]),
        // One node with three caches.
        (shape(1, 1, 3, 2, 2), vec![(1, (0, 0, 0, 1)), (2, (0, 0, 1, 2)), (11, (0, 0, 2, 5))]),
    ];
    for (shape, expected) in table {
        let machine = FakeSys::regular(shape).machine();
        for (cpu, (numa, socket, cache, core)) in expected {
            let place = CpuPlace {
                node: node(numa),
                socket: SocketId::new(socket),
                cache: CacheId::new(cache),
                core: CoreId::new(core),
            };
            assert_eq!(machine.cpus.places()[&CpuId::new(cpu)], place, "cpu {cpu}");
        }
        let nodes = shape.sockets * shape.nodes_per_socket;
        assert_eq!(machine.nodes.len(), nodes as usize);
        assert_eq!(machine.cpus.nodes().len(), nodes as usize);
        assert_eq!(machine.cpus.socket_count(), shape.sockets as usize);
        assert_eq!(machine.cpus.cpus_per_core(), shape.threads as usize);
        let cores = shape.caches_per_node * shape.cores_per_cache * nodes;
        assert_eq!(machine.cpus.cpus().len(), (cores * shape.threads) as usize);
    }
}

#[test]
fn memory_huge_pages_and_distances_of_each_node_are_read() {
    let machine = FakeSys::regular(shape(2, 2, 1, 1, 1)).machine();
    let third = &machine.nodes[&node(2)];
    assert_eq!(third.bytes, (1_048_576 + 2) * 1024);
    assert_eq!(third.huge_pages, [(2 << 20, 20), (1 << 30, 0)].into());
    let distances: Vec<(u8, u64)> = third.distances.iter().map(|(n, d)| (n.number(), *d)).collect();
    assert_eq!(distances, [(0, 32), (1, 32), (2, 10), (3, 12)]);
}

#[test]
fn numbers_of_nodes_may_have_gaps_and_a_node_may_have_no_cpus() {
    let sys = FakeSys::regular(shape(2, 1, 1, 2, 1));
    sys.write("node/node8/meminfo", "Node 8 MemTotal: 1024 kB");
    for (number, text) in [(0, "10 20 30"), (1, "20 10 31"), (8, "30 31 10")] {
        sys.write(&format!("node/node{number}/distance"), text);
    }
    let machine = sys.machine();
    assert_eq!(machine.nodes[&node(1)].distances[&node(8)], 31);
    assert_eq!(machine.nodes[&node(8)].bytes, 1 << 20);
    assert_eq!(machine.cpus.nodes().to_string(), "0-1");
    // A list of another length is not known to be in order.
    sys.write("node/node0/distance", "10 20");
    assert!(sys.machine().nodes[&node(0)].distances.is_empty());
    sys.write("node/node64/meminfo", "");
    assert!(matches!(discover(sys.dir.path()), Err(DiscoverError::Node(InvalidNumaNode(64)))));
}

#[test]
fn cpus_that_are_offline_are_left_out_and_their_sibling_is_the_core() {
    let sys = FakeSys::regular(shape(1, 1, 1, 4, 2));
    sys.write("cpu/online", "0-2,5-7");
    let machine = sys.machine();
    assert_eq!(machine.cpus.cpus().to_string(), "0-2,5-7");
    assert_eq!(machine.cpus.places()[&CpuId::new(7)].core, CoreId::new(7));
    assert_eq!(machine.cpus.places()[&CpuId::new(5)].core, CoreId::new(1));
    // Without the file the kernel cannot take a CPU offline.
    sys.remove("cpu/online");
    assert_eq!(sys.machine().cpus.cpus().len(), 8);
}

#[test]
fn a_machine_without_numa_nodes_has_its_sockets_as_nodes() {
    let sys = FakeSys::regular(shape(2, 1, 2, 1, 2));
    sys.remove("node");
    let machine = sys.machine();
    assert_eq!(machine.nodes.values().cloned().collect::<Vec<_>>(), vec![NodeMemory::default(); 2]);
    let place = machine.cpus.places()[&CpuId::new(7)];
    assert_eq!((place.node, place.socket, place.cache), (node(1), SocketId::new(1), CacheId::new(3)));
}

#[test]
fn absent_facts_are_allowed_and_unreadable_ones_are_not() {
    let sys = FakeSys::regular(shape(1, 1, 2, 2, 1));
    for optional in ["node/node0/meminfo", "node/node0/hugepages", "node/node0/distance"] {
        sys.remove(optional);
    }
    // The caches of the cores before it count.
    sys.remove("cpu/cpu1/cache/index2/id");
    let machine = sys.machine();
    assert_eq!(machine.nodes[&node(0)], NodeMemory::default());
    let caches: Vec<i64> = machine.cpus.places().values().map(|place| place.cache.number()).collect();
    assert_eq!(caches, [0, 0, 0, 0]);
    sys.remove("cpu/cpu3/topology/core_id");
    assert_eq!(sys.machine().cpus.cpus().to_string(), "0-2");
    for (path, text) in [
        ("node/node0/meminfo", "MemTotal: many kB"),
        ("node/node0/distance", "near"),
        ("cpu/cpu0/topology/core_id", "x"),
        ("cpu/online", "3-1"),
    ] {
        let sys = FakeSys::regular(shape(1, 1, 1, 1, 1));
        sys.write(path, text);
        let error = discover(sys.dir.path()).unwrap_err().to_string();
        assert!(error.contains(path) && error.contains(text), "{error}");
    }
    let empty = FakeSys::new();
    assert!(matches!(discover(empty.dir.path()), Err(DiscoverError::NoCpus)));
}

#[test]
fn this_machine_can_be_read() {
    let machine = discover(Path::new("/sys")).unwrap();
    assert!(machine.cpus.cpus_per_core() >= 1);
}
