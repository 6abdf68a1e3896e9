/// Clusters of duplicates: the connected components of pairs of documents (union-find, Tarjan 1975).
///
/// Documents have the numbers 0 to n − 1 in the order of the corpus. Memory: 4 bytes a document, or 8 for more than 2³²
/// documents; [`Clusters::finish`] needs as much again for the sizes.
///
/// The first document of a cluster, the one with the smallest number, stays. So the result does not depend on the order of
/// the pairs. datatrove has the same clusters, but keeps the root of its union-find, which depends on the sizes of clusters
/// when they were merged and on the order of its files of pairs. The number of documents that stay is the same.
///
/// ```
/// use stillhouse_dedup::Clusters;
///
/// let mut clusters = Clusters::new(5)?;
/// clusters.union(4, 2)?;
/// clusters.union(1, 4)?;
/// let clusters = clusters.finish()?;
/// assert_eq!((0..5).filter(|&document| clusters.is_first(document)).collect::<Vec<_>>(), [0, 1, 3]);
/// assert_eq!((clusters.first(4), clusters.size(4)), (Some(1), Some(3)));
/// # Ok::<(), stillhouse_dedup::ClusterError>(())
/// ```
#[derive(Debug)]
pub struct Clusters(Forest);

/// For each document a smaller one of its cluster, or itself. Numbers have 32 bits where that is enough.
#[derive(Debug)]
enum Forest {
    Small(Vec<u32>),
    Large(Vec<u64>),
}

/// An error of [`Clusters`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    /// There is no such document.
    #[error("document is {got}; valid: less than {documents}, the number of documents")]
    OutOfRange {
        /// The number of the document.
        got: u64,
        /// How many documents there are.
        documents: u64,
    },
    /// The memory is not available.
    #[error("documents is {documents}; valid: as many as fit in memory at {bytes} bytes a document")]
    OutOfMemory {
        /// How many documents there are.
        documents: u64,
        /// Bytes of memory for each.
        bytes: u64,
    },
}

impl Clusters {
    /// Puts each of `documents` documents into a cluster of its own.
    pub fn new(documents: u64) -> Result<Self, ClusterError> {
        Ok(Self(if documents <= 1 << 32 {
            Forest::Small(singletons(documents)?)
        } else {
            Forest::Large(singletons(documents)?)
        }))
    }

    /// Returns the number of documents.
    pub fn documents(&self) -> u64 {
        match &self.0 {
            Forest::Small(parents) => parents.len() as u64,
            Forest::Large(parents) => parents.len() as u64,
        }
    }

    /// Merges the clusters of two documents. Returns whether they were different clusters. Takes O(log n) time, amortized.
    pub fn union(&mut self, a: u64, b: u64) -> Result<bool, ClusterError> {
        let documents = self.documents();
        if let Some(got) = [a, b].into_iter().find(|&document| document >= documents) {
            return Err(ClusterError::OutOfRange { got, documents });
        }
        Ok(match &mut self.0 {
            Forest::Small(parents) => unite(parents, a, b),
            Forest::Large(parents) => unite(parents, a, b),
        })
    }

    /// Finds the first document and the size of all clusters, in one pass over the documents.
    pub fn finish(self) -> Result<FinishedClusters, ClusterError> {
        Ok(FinishedClusters(match self.0 {
            Forest::Small(parents) => Table::Small(resolve(parents)?),
            Forest::Large(parents) => Table::Large(resolve(parents)?),
        }))
    }
}

/// The clusters after all pairs, see [`Clusters::finish`].
#[derive(Debug)]
pub struct FinishedClusters(Table);

#[derive(Debug)]
enum Table {
    Small(Resolved<u32>),
    Large(Resolved<u64>),
}

/// For each document the first of its cluster, and for each first document the size of the cluster.
#[derive(Debug)]
struct Resolved<T> {
    firsts: Vec<T>,
    /// Sizes less one, so that 2³² documents fit into 32 bits.
    others: Vec<T>,
}

impl FinishedClusters {
    /// Returns the first document of the cluster of a document, or `None` if there is no such document.
    pub fn first(&self, document: u64) -> Option<u64> {
        match &self.0 {
            Table::Small(table) => get(&table.firsts, document),
            Table::Large(table) => get(&table.firsts, document),
        }
    }

    /// Returns whether a document is the first of its cluster, the one that stays.
    pub fn is_first(&self, document: u64) -> bool {
        self.first(document) == Some(document)
    }

    /// Returns the number of documents in the cluster of a document, or `None` if there is no such document.
    pub fn size(&self, document: u64) -> Option<u64> {
        let first = self.first(document)?;
        let others = match &self.0 {
            Table::Small(table) => get(&table.others, first),
            Table::Large(table) => get(&table.others, first),
        };
        Some(others? + 1)
    }

    /// Returns the number of documents.
    pub fn documents(&self) -> u64 {
        match &self.0 {
            Table::Small(table) => table.firsts.len() as u64,
            Table::Large(table) => table.firsts.len() as u64,
        }
    }
}

/// A document's number in memory.
trait Number: Copy + Default + PartialEq {
    fn from_u64(number: u64) -> Self;
    fn to_u64(self) -> u64;
}

impl Number for u32 {
    fn from_u64(number: u64) -> Self {
        number as u32
    }

    fn to_u64(self) -> u64 {
        self.into()
    }
}

impl Number for u64 {
    fn from_u64(number: u64) -> Self {
        number
    }

    fn to_u64(self) -> u64 {
        self
    }
}

fn allocate<T>(documents: u64) -> Result<Vec<T>, ClusterError> {
    let (mut numbers, bytes) = (Vec::new(), size_of::<T>() as u64);
    let reserved = usize::try_from(documents).is_ok_and(|count| numbers.try_reserve_exact(count).is_ok());
    if reserved { Ok(numbers) } else { Err(ClusterError::OutOfMemory { documents, bytes }) }
}

fn singletons<T: Number>(documents: u64) -> Result<Vec<T>, ClusterError> {
    let mut parents = allocate(documents)?;
    parents.extend((0..documents).map(T::from_u64));
    Ok(parents)
}

fn get<T: Number>(numbers: &[T], document: u64) -> Option<u64> {
    Some(numbers.get(usize::try_from(document).ok()?)?.to_u64())
}

/// Returns the root of a document and halves its path.
fn root<T: Number>(parents: &mut [T], mut document: u64) -> u64 {
    loop {
        let parent = get(parents, document).unwrap_or(document);
        let grandparent = get(parents, parent).unwrap_or(parent);
        if parent == grandparent {
            return parent;
        }
        set(parents, document, grandparent);
        document = grandparent;
    }
}

fn set<T: Number>(parents: &mut [T], document: u64, parent: u64) {
    if let Some(slot) = parents.get_mut(document as usize) {
        *slot = T::from_u64(parent);
    }
}

/// Joins the larger root to the smaller, so a root is the first document of its cluster.
fn unite<T: Number>(parents: &mut [T], a: u64, b: u64) -> bool {
    let (a, b) = (root(parents, a), root(parents, b));
    set(parents, a.max(b), a.min(b));
    a != b
}

fn resolve<T: Number>(mut parents: Vec<T>) -> Result<Resolved<T>, ClusterError> {
    let documents = parents.len() as u64;
    let mut others = allocate(documents)?;
    others.resize(parents.len(), T::default());
    for document in 0..documents {
        // a parent is smaller, so its own parent is the first document already
        let parent = get(&parents, document).unwrap_or(document);
        let first = get(&parents, parent).unwrap_or(parent);
        set(&mut parents, document, first);
        if first != document {
            let count = get(&others, first).unwrap_or(0);
            set(&mut others, first, count + 1);
        }
    }
    Ok(Resolved { firsts: parents, others })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_64_bits_have_the_same_clusters() {
        let mut small = Clusters::new(100).unwrap();
        let mut large = Clusters(Forest::Large(singletons(100).unwrap()));
        for pair in 0..60u64 {
            let (a, b) = (pair * 37 % 100, pair * pair % 100);
            assert_eq!(small.union(a, b), large.union(a, b));
        }
        let (small, large) = (small.finish().unwrap(), large.finish().unwrap());
        for document in 0..101 {
            assert_eq!(small.first(document), large.first(document));
            assert_eq!(small.size(document), large.size(document));
        }
    }

    #[test]
    fn errors_state_what_is_valid() {
        let error = Clusters::new(3).unwrap().union(1, 3).unwrap_err();
        assert_eq!(error.to_string(), "document is 3; valid: less than 3, the number of documents");
        let error = Clusters::new(u64::MAX).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("documents is {}; valid: as many as fit in memory at 8 bytes a document", u64::MAX)
        );
    }
}
