"""Words of the keys of needles: 128 adjectives and 128 nouns.

The list is fixed, rather than taken from the package `wonderwords` as in RULER, so that a sample is the same with every
version of every package. The words are short and common, so that small tokenizers need few tokens for them.
"""

ADJECTIVES = tuple(
    """
    able amber ancient arctic autumn bitter blank blue bold brave bright brisk broad bronze busy calm careful cheap
    clean clear clever cold common cool copper crimson curious daring dark deep distant double dry early east easy
    empty exact fair famous fancy fast final fine firm flat formal free fresh gentle giant glad golden grand gray great
    green happy heavy hidden high hollow honest humble icy idle inner ivory jolly keen kind large late lazy level light
    little lively local lone long loud low lucky main mellow mild modern narrow neat new noble north odd old open
    orange outer pale patient plain polite proud pure quick quiet rapid rare red rich rough round royal scarlet secret
    sharp shy silent silver simple sleepy slow small smooth soft solid sour steady
    """.split()  # noqa: SIM905
)
NOUNS = tuple(
    """
    anchor apple arrow autumn badge banner barrel basket beacon bell bench bird blanket boat book bottle branch bread
    bridge brook bucket button cabin camera candle canyon carpet castle cave chair circle cliff clock cloud coast
    comet corner cottage cradle crown desert desk dragon drum eagle engine farm feather fence field finger flag flame
    flower forest fountain fox garden gate glacier glove guitar hammer harbor hat hill horse house island jacket
    jungle kettle key kite ladder lake lamp lantern leaf letter lion market meadow mirror moon mountain needle nest
    ocean orchard paper path pencil piano pillow planet pocket pond prairie puzzle rabbit river road rocket roof
    saddle sail school shadow shell ship shore spoon spring square star station stone street summer table temple ticket
    tower train valley village window
    """.split()  # noqa: SIM905
)
