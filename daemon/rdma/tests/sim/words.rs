//! What an end is shown by its daemon, and what a test tells a daemon about an end.

use super::Sim;
use lane::abi::{Control as Words, Epoch, RxWord, TxWord};
use std::sync::atomic::Ordering::Relaxed;

impl Sim {
    /// Node `n` takes no switch of this lane's sender any more; the epoch of the last one that it took.
    pub fn refuse_switches(&mut self, n: usize, l: usize) -> Epoch {
        let id = self.lanes[l].ids[n];
        self.nodes[n].pair.refuse_switches(id);
        self.told(n, l).epoch()
    }

    /// Node `n` does not invite the application of this lane to its ring, or does again.
    pub fn gate(&mut self, n: usize, l: usize, shut: bool) {
        self.nodes[n].pair.gate(self.lanes[l].ids[n], shut);
    }

    /// What this end has been told of the other one's sender: the last switch, and how far it is.
    pub fn told(&self, n: usize, l: usize) -> TxWord {
        let (words, slot) = self.proxy(n, l);
        words.tx[slot].state.load(Relaxed)
    }

    /// What this end is shown of the other one's receiver.
    pub fn shown(&self, n: usize, l: usize) -> RxWord {
        let (words, slot) = self.proxy(n, l);
        words.rx[slot].word.load(Relaxed)
    }

    fn proxy(&self, n: usize, l: usize) -> (&Words, usize) {
        let lane = &self.lanes[l];
        let words = self.nodes[n].clients[lane.client].proxy.control();
        (words.expect("mapped"), lane.ends[n].slot as usize)
    }
}
